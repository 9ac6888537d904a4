//! A small SVG writer: shapes, text, and fills that are distinguishable without color.

use crate::escape::for_markup;
use std::fmt::Write;
use symmalloc_text::visible_line;

/// Fill of an area. Colors are from Okabe and Ito's palette, and the patterns also differ in black and white.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Fill {
    /// Blue, plain.
    Live,
    /// Orange, rising lines.
    Fenced,
    /// Vermilion, crossed lines.
    Differs,
    /// White.
    Free,
    /// Fill of the n-th heap.
    Heap(usize),
    /// Fill of all heaps without a separate fill.
    Others,
}

/// Number of heaps with a separate fill.
pub(crate) const HEAP_FILLS: usize = 6;

impl Fill {
    /// Returns the background color, and the path of the lines over it.
    fn paint(self) -> (&'static str, Option<&'static str>) {
        match self {
            Fill::Live => ("#0072b2", None),
            Fill::Fenced => ("#e69f00", Some("M-2 2l4-4M0 8l8-8M6 10l4-4")),
            Fill::Differs => ("#d55e00", Some("M0 0l8 8M0 8l8-8")),
            Fill::Free => ("#fff", None),
            Fill::Heap(0) => ("#56b4e9", None),
            Fill::Heap(1) => ("#e69f00", Some("M-2 2l4-4M0 8l8-8M6 10l4-4")),
            Fill::Heap(2) => ("#009e73", Some("M4 0v8")),
            Fill::Heap(3) => ("#f0e442", Some("M0 4h8")),
            Fill::Heap(4) => ("#cc79a7", Some("M0 0l8 8M0 8l8-8")),
            Fill::Heap(_) => ("#0072b2", Some("M-2 6l4 4M0 0l8 8M6-2l4 4")),
            Fill::Others => ("#999", Some("M4 0v8M0 4h8")),
        }
    }

    fn lines(self) -> &'static str {
        match self {
            Fill::Differs | Fill::Heap(2 | 5) => "#fff",
            _ => "#000",
        }
    }

    fn name(self) -> String {
        match self {
            Fill::Heap(n) => format!("h{n}"),
            other => format!("{other:?}").to_lowercase(),
        }
    }
}

/// The part of a text that is aligned to its position.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Anchor {
    Start,
    Middle,
    End,
}

/// Text sizes, in CSS pixels.
pub(crate) const TITLE: u32 = 17;
pub(crate) const BODY: u32 = 14;
pub(crate) const SMALL: u32 = 12;

/// A picture under construction, with a fixed width.
pub(crate) struct Svg {
    /// Prefix of the pattern ids, which keeps several pictures on one page apart.
    prefix: &'static str,
    width: u32,
    body: String,
    fills: Vec<Fill>,
}

impl Svg {
    pub(crate) fn new(prefix: &'static str, width: u32) -> Self {
        Svg { prefix, width, body: String::new(), fills: Vec::new() }
    }

    pub(crate) fn width(&self) -> f64 {
        self.width.into()
    }

    pub(crate) fn is_narrow(&self) -> bool {
        self.width < 600
    }

    /// Returns the value of the attribute `fill`.
    fn fill(&mut self, fill: Fill) -> String {
        match fill.paint() {
            (color, None) => color.to_owned(),
            _ => {
                if !self.fills.contains(&fill) {
                    self.fills.push(fill);
                }
                format!("url(#{}{})", self.prefix, fill.name())
            }
        }
    }

    /// Draws a rectangle with a thin outline.
    pub(crate) fn swatch(&mut self, x: f64, y: f64, width: f64, height: f64, fill: Fill) {
        let fill = self.fill(fill);
        let (x, y, width, height) = (short(x), short(y), short(width), short(height));
        let _ = write!(
            self.body,
            r##"<rect x="{x}" y="{y}" width="{width}" height="{height}" fill="{fill}" stroke="#000" stroke-width=".8"/>"##
        );
    }

    /// Draws a filled area.
    pub(crate) fn area(&mut self, path: &str, fill: Fill) {
        let fill = self.fill(fill);
        let _ = write!(self.body, r#"<path d="{path}" fill="{fill}"/>"#);
    }

    /// Draws a line. `style` contains `stroke`, `stroke-width` and `stroke-dasharray`.
    pub(crate) fn line(&mut self, path: &str, style: &str) {
        let _ = write!(self.body, r#"<path d="{path}" fill="none" {style}/>"#);
    }

    pub(crate) fn dot(&mut self, x: f64, y: f64) {
        let (x, y) = (short(x), short(y));
        let _ = write!(self.body, r##"<circle cx="{x}" cy="{y}" r="4" fill="#fff" stroke="#000" stroke-width="2"/>"##);
    }

    /// Adds a tooltip to an area.
    pub(crate) fn tooltip(&mut self, path: &str, words: &str) {
        let _ = write!(self.body, r#"<path d="{path}" fill-opacity="0"><title>{}</title></path>"#, for_markup(words));
    }

    pub(crate) fn text(&mut self, x: f64, y: f64, size: u32, anchor: Anchor, text: &str) {
        self.styled_text(x, y, size, anchor, "", text);
    }

    pub(crate) fn bold(&mut self, x: f64, y: f64, size: u32, anchor: Anchor, text: &str) {
        self.styled_text(x, y, size, anchor, r#" font-weight="600""#, text);
    }

    /// Draws white text, for dark areas.
    pub(crate) fn light(&mut self, x: f64, y: f64, size: u32, anchor: Anchor, text: &str) {
        self.styled_text(x, y, size, anchor, r##" fill="#fff" font-weight="600""##, text);
    }

    /// Draws text on a white tag, which is readable on any background.
    pub(crate) fn tag(&mut self, x: f64, y: f64, size: u32, anchor: Anchor, text: &str) {
        let width = text_width(text, size) * 1.1 + 6.0;
        let left = match anchor {
            Anchor::Start => x - 3.0,
            Anchor::Middle => x - width / 2.0,
            Anchor::End => x - width + 3.0,
        };
        let (top, height) = (y - f64::from(size), f64::from(size) + 4.0);
        let (left, top, width, height) = (short(left), short(top), short(width), short(height));
        let _ = write!(
            self.body,
            r##"<rect x="{left}" y="{top}" width="{width}" height="{height}" rx="3" fill="#fff" fill-opacity=".9"/>"##
        );
        self.bold(x, y, size, anchor, text);
    }

    fn styled_text(&mut self, x: f64, y: f64, size: u32, anchor: Anchor, style: &str, text: &str) {
        let anchor = match anchor {
            Anchor::Start => "",
            Anchor::Middle => r#" text-anchor="middle""#,
            Anchor::End => r#" text-anchor="end""#,
        };
        let (x, y, text) = (short(x), short(y), for_markup(text));
        let _ = write!(self.body, r#"<text x="{x}" y="{y}" font-size="{size}"{anchor}{style}>{text}</text>"#);
    }

    /// Returns the complete picture. `class` is its class on a page, and `words` its text description, for accessibility.
    pub(crate) fn finish(mut self, height: f64, class: &str, title: &str, words: &str) -> String {
        let (width, height, prefix) = (self.width, short(height.ceil()), self.prefix);
        let (title, words) = (for_markup(title), for_markup(words));
        self.fills.sort();
        let mut defs = String::new();
        for fill in &self.fills {
            let (color, lines) = fill.paint();
            let (name, stroke) = (fill.name(), fill.lines());
            let _ = write!(
                defs,
                r#"<pattern id="{prefix}{name}" width="8" height="8" patternUnits="userSpaceOnUse"><path fill="{color}" d="M0 0h8v8H0z"/><path d="{}" stroke="{stroke}" stroke-width="1.2"/></pattern>"#,
                lines.unwrap_or_default()
            );
        }
        let class = if class.is_empty() { String::new() } else { format!(r#" class="{class}""#) };
        format!(
            r##"<svg xmlns="http://www.w3.org/2000/svg"{class} viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" aria-labelledby="{prefix}title {prefix}words" font-family="system-ui,-apple-system,'Segoe UI',Roboto,'DejaVu Sans',sans-serif" fill="#000"><title id="{prefix}title">{title}</title><desc id="{prefix}words">{words}</desc><defs>{defs}</defs><rect width="{width}" height="{height}" fill="#fff"/>{}</svg>
"##,
            self.body
        )
    }
}

/// Formats a coordinate in tenths of a pixel.
pub(crate) fn short(number: f64) -> String {
    let tenths = (number * 10.0).round() as i64;
    let sign = if tenths < 0 { "-" } else { "" };
    let (whole, tenth) = (tenths.abs() / 10, tenths.abs() % 10);
    if tenth == 0 { format!("{sign}{whole}") } else { format!("{sign}{whole}.{tenth}") }
}

/// Estimates the width of a text, on the wide side.
pub(crate) fn text_width(text: &str, size: u32) -> f64 {
    text.chars().count() as f64 * f64::from(size) * 0.6
}

/// Returns as much of a text as fits, with an ellipsis if it is cut.
pub(crate) fn fitting(text: &str, size: u32, width: f64) -> String {
    let text = visible_line(text);
    if text_width(&text, size) <= width {
        return text.into_owned();
    }
    let room = (width / (f64::from(size) * 0.6)).max(1.0) as usize - 1;
    text.chars().take(room).chain(['…']).collect()
}

/// Breaks a text between words into lines of at most this width.
pub(crate) fn wrapped(text: &str, size: u32, width: f64) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in text.split(' ') {
        let line = lines.last_mut().expect("there is at least one line");
        if !line.is_empty() && text_width(&format!("{line} {word}"), size) > width {
            lines.push(word.to_owned());
        } else {
            if !line.is_empty() {
                line.push(' ');
            }
            line.push_str(word);
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn coordinates_are_short() {
        assert_eq!([0.0, 1.0, 1.25, 0.04, -0.5, -12.04].map(short), ["0", "1", "1.3", "0", "-0.5", "-12"]);
    }

    #[test]
    fn text_is_broken_between_words_and_cut_with_an_ellipsis() {
        assert_eq!(wrapped("one two three", 10, 45.0), ["one two", "three"]);
        assert_eq!((fitting("weights", 10, 42.0), fitting("weights", 10, 30.0)), ("weights".into(), "weig…".into()));
    }

    #[test]
    fn a_pattern_is_defined_once_under_the_pictures_prefix() {
        let mut svg = Svg::new("w1", 100);
        svg.swatch(0.0, 0.0, 10.0, 10.0, Fill::Fenced);
        svg.area("M0 0h1v1z", Fill::Fenced);
        let text = svg.finish(20.0, "", "T", "W");
        assert_eq!((text.matches("<pattern").count(), text.matches("url(#w1fenced)").count()), (1, 2));
    }
}
