//! The known word nearest to a misspelt one, for errors that say what was probably meant.
//!
//! A word is near when at most a third of it (at least one character) is to be inserted, deleted or replaced.

/// The longest word that is looked at; a longer one is not a slip of the fingers.
const WORD_BYTES_MAX: usize = 64;

/// The first of the `known` words that is nearest to `word`, if any is near.
#[doc(hidden)]
pub fn nearest<'k>(word: &str, known: impl IntoIterator<Item = &'k str>) -> Option<&'k str> {
    if word.len() > WORD_BYTES_MAX {
        return None;
    }
    known
        .into_iter()
        .map(|candidate| (strsim::levenshtein(word, candidate), candidate))
        .filter(|(distance, candidate)| *distance <= (candidate.len() / 3).max(1) && *distance < candidate.len())
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, candidate)| candidate)
}

/// The part of an error's message that says what was probably meant, if that is known.
#[doc(hidden)]
pub fn did_you_mean(word: Option<&str>) -> String {
    word.map_or_else(String::new, |word| format!(", did you mean `{word}`?"))
}
