//! Finds the known word nearest to a misspelled one, for suggestions in errors.
//!
//! A word is near if at most a third of it, and at least one character, must be inserted, deleted or replaced.

/// Maximum length of a compared word, in bytes. A longer word is not a typing error.
const WORD_BYTES_MAX: usize = 64;

/// Returns the first of the `known` words that is nearest to `word`, if one is near.
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

/// Returns the part of an error's message that suggests a word, if there is one.
#[doc(hidden)]
pub fn did_you_mean(word: Option<&str>) -> String {
    word.map_or_else(String::new, |word| format!(", did you mean `{word}`?"))
}
