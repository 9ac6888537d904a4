//! Escaping of text from outside the program for terminals, pages and JSON. [`symmalloc_text`] determines which
//! characters are hidden.
//!
//! ```text
//! printed text, errors ──► output ──► for_terminal
//! pages, pictures ───────► page, svg ► for_markup       both: `visible`
//! JSON ──────────────────► output ──► for_json          the same characters, in JSON's own notation
//! ```

use std::borrow::Cow;
use std::collections::hash_map::RandomState;
use std::fmt::Write;
use std::hash::{BuildHasher, Hasher};
use std::sync::OnceLock;
use symmalloc_text::{is_hidden, replaced, visible, visible_line};

/// Escapes text for element content or an attribute.
pub(crate) fn for_markup(text: &str) -> String {
    let text = visible(text);
    let is_markup = |character| matches!(character, '&' | '<' | '>' | '"');
    let escaped = replaced(&text, is_markup, |out, character| {
        out.push_str(match character {
            '&' => "&amp;",
            '<' => "&lt;",
            '>' => "&gt;",
            _ => "&quot;",
        });
    });
    escaped.into_owned()
}

/// Escapes hidden characters in a JSON document, which can occur only in its strings.
pub(crate) fn for_json(document: &str) -> Cow<'_, str> {
    replaced(document, is_hidden, |out, character| {
        for unit in character.encode_utf16(&mut [0; 2]) {
            let _ = write!(out, "\\u{unit:04x}");
        }
    })
}

/// Quotes an argument for a shell, with hidden characters in the notation of bash and zsh.
pub(crate) fn quoted(argument: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "._-/:,=+".contains(c);
    if !argument.is_empty() && argument.chars().all(is_plain) {
        return argument.to_owned();
    }
    let needs_number = |character| character == '\n' || is_hidden(character);
    if !argument.contains(needs_number) {
        return format!("'{}'", argument.replace('\'', "'\\''"));
    }
    let is_special = |character| needs_number(character) || matches!(character, '\'' | '\\');
    let quoted = replaced(argument, is_special, |out, character| match character {
        '\'' | '\\' => out.extend(['\\', character]),
        other => drop(write!(out, "\\U{:08x}", u32::from(other))),
    });
    format!("$'{quoted}'")
}

/// Escapes hidden characters in printed text, except for styles added by [`styled`].
pub(crate) fn for_terminal(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for (index, part) in text.split(mark()).enumerate() {
        let (style, rest) = if index == 0 { ("", part) } else { part.split_once(END).unwrap_or(("0", part)) };
        if index > 0 {
            let _ = write!(out, "\u{1b}[{style}m");
        }
        out += &visible(rest);
    }
    out
}

/// Applies a terminal style to a line, for [`for_terminal`].
pub(crate) fn styled(text: &str, style: &str) -> String {
    let mark = mark();
    format!("{mark}{style}{END}{}{mark}0{END}", visible_line(text))
}

/// Terminator of a style's numbers.
const END: char = 'm';

/// Returns the marker that starts a style. It is random in each process, so foreign text cannot contain it.
fn mark() -> &'static str {
    static MARK: OnceLock<String> = OnceLock::new();
    MARK.get_or_init(|| {
        let [one, other] = [RandomState::new(), RandomState::new()].map(|state| state.build_hasher().finish());
        format!("\u{1b}{one:016x}{other:016x}")
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};
    use symmalloc_sim::SplitMix64;

    /// Generates random texts of plain characters, markup, styles and every kind of hidden character.
    fn texts() -> impl Iterator<Item = String> {
        let mut random = SplitMix64::new(1);
        let mut character = move || {
            let range = match random.below(8) {
                0 => 0..0x20,
                1 => 0x7f..0xa0,
                2 => 0x2000..0x2070,
                3 => 0xfdd0..0xfe00,
                4 => 0xfff0..0x1_0000,
                5 => 0xe_0000..0xe_0080,
                6 => 0x20..0x7f,
                _ => 0..0x11_0000,
            };
            char::from_u32(range.start + random.below(u64::from(range.end - range.start)) as u32).unwrap_or('[')
        };
        (0..20_000).map(move |number| (0..number % 40).map(|_| character()).collect())
    }

    fn hidden(text: &str) -> Option<char> {
        text.chars().find(|character| *character != '\n' && is_hidden(*character))
    }

    #[test]
    fn hidden_characters_are_escaped_in_every_output() {
        for text in texts() {
            assert_eq!(hidden(&for_terminal(&text)), None, "{text:?}");
            let markup = for_markup(&text);
            assert!(hidden(&markup).is_none() && !markup.contains(['<', '>', '"']), "{text:?}");
            let document = json!([text]).to_string();
            let shown = for_json(&document);
            assert_eq!(hidden(&shown), None, "{text:?}");
            assert_eq!(serde_json::from_str::<Value>(&shown).unwrap(), json!([text]));
        }
    }

    #[test]
    fn markup_is_escaped() {
        assert_eq!(for_markup("a<b>&\"\u{1}c"), r"a&lt;b&gt;&amp;&quot;\u{1}c");
    }

    #[test]
    fn arguments_are_quoted_where_a_shell_needs_it() {
        assert_eq!(quoted("a/b.trace"), "a/b.trace");
        assert_eq!(quoted("it's [x]"), "'it'\\''s [x]'");
        assert_eq!(quoted("it's\u{1b}\n"), r"$'it\'s\U0000001b\U0000000a'");
    }

    #[test]
    fn only_styles_of_the_program_itself_reach_the_terminal() {
        assert_eq!(for_terminal(&format!("x {}\n", styled("bad\n", "1;31"))), "x \u{1b}[1;31mbad\\n\u{1b}[0m\n");
        assert_eq!(for_terminal("\u{1b}[1;32mthe same\u{1b}[0m"), r"\u{1b}[1;32mthe same\u{1b}[0m");
    }
}
