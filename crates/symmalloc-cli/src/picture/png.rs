//! Conversion of our SVG pictures to PNG with resvg, at twice their size.
//!
//! Text is converted to outlines of an embedded font. So a machine without fonts draws the same picture, and the renderer needs
//! neither a font database nor a text shaper, which would double its build time.

use resvg::tiny_skia::{Pixmap, Transform};
use resvg::usvg::{Options, Tree};
use std::fmt::Write;
use ttf_parser::{Face, OutlineBuilder};

static REGULAR: &[u8] = include_bytes!("../../fonts/DejaVuSans.ttf");
static BOLD: &[u8] = include_bytes!("../../fonts/DejaVuSans-Bold.ttf");

/// Number of pixels per CSS pixel, for sharp pictures on dense screens.
const PIXELS: f32 = 2.0;

/// Error for a picture that is too large to rasterize.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the picture is too large for a .png: draw an .svg, or select a part with --pool and --stream")]
pub(crate) struct TooLargeForPixels;

/// Returns the picture as a PNG file.
pub(crate) fn png(svg: &str) -> Result<Vec<u8>, TooLargeForPixels> {
    let tree = Tree::from_str(&outlined(svg), &Options::default()).map_err(|_| TooLargeForPixels)?;
    let [width, height] = [tree.size().width(), tree.size().height()].map(|side| (side * PIXELS).ceil() as u32);
    let mut pixels = Pixmap::new(width, height).ok_or(TooLargeForPixels)?;
    resvg::render(&tree, Transform::from_scale(PIXELS, PIXELS), &mut pixels.as_mut());
    pixels.encode_png().map_err(|_| TooLargeForPixels)
}

/// Replaces text by outlines. The input comes from our own writer, whose attributes have a fixed notation.
fn outlined(svg: &str) -> String {
    let faces = [REGULAR, BOLD].map(|font| Face::parse(font, 0).expect("the font is a part of the program"));
    let mut out = String::with_capacity(svg.len() * 2);
    let mut rest = svg;
    while let Some((before, text)) = rest.split_once("<text ") {
        let Some(((attributes, content), after)) =
            text.split_once("</text>").and_then(|(text, after)| Some((text.split_once('>')?, after)))
        else {
            break;
        };
        out += before;
        let attribute = |name: &str| {
            let (_, value) = attributes.split_once(&format!("{name}=\""))?;
            value.split('"').next()
        };
        let number = |name: &str| attribute(name).and_then(|value| value.parse().ok()).unwrap_or(0.0);
        let face = &faces[usize::from(attribute("font-weight").is_some())];
        let fill = attribute("fill").unwrap_or("#000");
        let line = Line { face, size: number("font-size"), text: &unescaped(content) };
        let left = match attribute("text-anchor") {
            Some("middle") => number("x") - line.width() / 2.0,
            Some("end") => number("x") - line.width(),
            _ => number("x"),
        };
        let _ = write!(out, r#"<path d="{}" fill="{fill}"/>"#, line.outlines(left, number("y")));
        rest = after;
    }
    out + rest
}

fn unescaped(text: &str) -> String {
    text.replace("&lt;", "<").replace("&gt;", ">").replace("&quot;", "\"").replace("&amp;", "&")
}

/// A line of text in a font.
struct Line<'a> {
    face: &'a Face<'static>,
    size: f64,
    text: &'a str,
}

impl Line<'_> {
    fn scale(&self) -> f64 {
        self.size / f64::from(self.face.units_per_em())
    }

    fn advance(&self, character: char) -> f64 {
        let glyph = self.face.glyph_index(character).unwrap_or_default();
        f64::from(self.face.glyph_hor_advance(glyph).unwrap_or(0)) * self.scale()
    }

    fn width(&self) -> f64 {
        self.text.chars().map(|character| self.advance(character)).sum()
    }

    fn outlines(&self, mut x: f64, y: f64) -> String {
        let mut path = String::new();
        for character in self.text.chars() {
            let glyph = self.face.glyph_index(character).unwrap_or_default();
            self.face.outline_glyph(glyph, &mut Pen { path: &mut path, x, y, scale: self.scale() });
            x += self.advance(character);
        }
        path
    }
}

/// Writer of a glyph's outline at a position. The y axis of a font points upwards.
struct Pen<'a> {
    path: &'a mut String,
    x: f64,
    y: f64,
    scale: f64,
}

impl Pen<'_> {
    fn add(&mut self, command: char, points: &[(f32, f32)]) {
        self.path.push(command);
        for (x, y) in points {
            // Use hundredths of a pixel: the tenths of other coordinates would be visible in small letters.
            let [x, y] = [self.x + f64::from(*x) * self.scale, self.y - f64::from(*y) * self.scale];
            let _ = write!(self.path, "{x:.2} {y:.2} ");
        }
    }
}

impl OutlineBuilder for Pen<'_> {
    fn move_to(&mut self, x: f32, y: f32) {
        self.add('M', &[(x, y)]);
    }

    fn line_to(&mut self, x: f32, y: f32) {
        self.add('L', &[(x, y)]);
    }

    fn quad_to(&mut self, x1: f32, y1: f32, x: f32, y: f32) {
        self.add('Q', &[(x1, y1), (x, y)]);
    }

    fn curve_to(&mut self, x1: f32, y1: f32, x2: f32, y2: f32, x: f32, y: f32) {
        self.add('C', &[(x1, y1), (x2, y2), (x, y)]);
    }

    fn close(&mut self) {
        self.path.push('z');
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::picture::svg::{Anchor, Fill, Svg};

    #[test]
    fn text_is_drawn_without_any_font_on_the_machine() {
        let drawn = |text: &str| {
            let mut svg = Svg::new("t", 100);
            svg.swatch(2.0, 30.0, 20.0, 8.0, Fill::Fenced);
            svg.bold(50.0, 20.0, 14, Anchor::Middle, text);
            png(&svg.finish(40.0, "", "T", "W")).unwrap()
        };
        let pixels = Pixmap::decode_png(&drawn("a<b & Ω")).unwrap();
        assert_eq!((pixels.width(), pixels.height()), (200, 80));
        let dark = |from: u32, to: u32| {
            (from..to)
                .flat_map(|x| (0..50).map(move |y| (x, y)))
                .filter(|(x, y)| pixels.pixel(*x, *y).unwrap().red() < 90)
                .count()
        };
        assert!(dark(40, 160) > 200, "the text is missing");
        assert_eq!((dark(0, 30), dark(170, 200)), (0, 0), "the text is not in the middle");
        assert_ne!(drawn("one"), drawn("two"));
        assert_eq!(drawn("one"), drawn("one"));
    }
}
