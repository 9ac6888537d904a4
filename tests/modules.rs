//! House rules: the order of the core's modules, no import cycles between files, few modules at the top, and one convention for modules.
//!
//! The tests check the source text: `use` declarations, and paths that begin with `crate`, `super`, `self` or a child module. They ignore
//! comments, strings and test modules. Re-exporting from a child module does not count as using it, unless the name is also used elsewhere
//! in the file.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

/// The top-level modules of the core. Each may use itself and those before it. `lib.rs` comes last.
const MODULES: [&str; 16] = [
    "types",
    "sync",
    "config",
    "streams",
    "blocks",
    "history",
    "stats",
    "pointers",
    "ledger",
    "arena",
    "plans",
    "stitching",
    "sleep",
    "heap",
    "allocator",
    "metrics",
];

/// Structs of the core whose fields are visible in the whole crate, each with the reason. All other structs keep their fields private to
/// their file.
const PLAIN_DATA: [(&str, &str); 18] = [
    ("arena/fencing.rs Context", "parameters of heap operations"),
    ("arena.rs Removed", "a result"),
    ("blocks/table.rs Block", "a row of the table, filled in by the arena and the free index"),
    ("blocks/table.rs Segment", "a row of the table"),
    ("config/size_rules.rs SizeRules", "immutable once created"),
    ("heap.rs Freed", "a result"),
    ("heap/revive.rs Revived", "a result"),
    ("heap/trim.rs Released", "a result"),
    ("history/segment_log.rs Retired", "the remainder of a dead segment"),
    ("plans/plan.rs PlanInputs", "parameters"),
    ("pointers.rs DirectoryEntry", "a result of a look-up"),
    ("sleep/mappings.rs Mapping", "a value"),
    ("sleep.rs State", "the state of a pool, protected by its lock"),
    ("stats/budget.rs Budgets", "references that are passed together"),
    ("stats/usage.rs RareCounts", "independent numbers"),
    ("stitching.rs Granule", "a value"),
    ("stitching.rs Home", "a result"),
    ("streams/fences.rs Fence", "a value"),
];

const CORE_TOP_MAX: usize = 17;

/// Files of one crate: path within `src`, and text.
type Files = BTreeMap<String, String>;

#[test]
fn modules_of_the_core_use_only_those_before_them() {
    let arrows = arrows(&core());
    assert!(arrows.len() > 100, "the imports were not read: {} arrows", arrows.len());
    let up: Vec<Arrow> = arrows.into_iter().filter(Arrow::runs_up).collect();
    assert!(up.is_empty(), "a module uses a later one:\n{}", listed(&up));
}

#[test]
fn imports_between_files_are_acyclic() {
    let circles: Vec<String> = crates()
        .iter()
        .flat_map(|(name, files)| circles(&arrows(files)).into_iter().map(move |circle| format!("{name}: {circle}")))
        .collect();
    assert!(circles.is_empty(), "files use each other in a circle:\n{}", listed(&circles));
}

#[test]
fn a_module_with_children_is_a_file_next_to_their_folder() {
    let crates = crates();
    let paths = crates.iter().flat_map(|(name, files)| files.keys().map(move |path| format!("{name}: {path}")));
    let others: Vec<String> = paths.filter(|path| path.ends_with("/mod.rs")).collect();
    assert!(others.is_empty(), "the convention is `a.rs` with `a/`, not `a/mod.rs`:\n{}", listed(&others));
}

#[test]
fn the_core_has_few_top_level_modules() {
    let core = core();
    let top = top(&core);
    assert!(top.len() <= CORE_TOP_MAX, "{} modules at the top of the core: {top:?}", top.len());
}

#[test]
fn fields_in_the_core_are_private_to_their_file() {
    let fields: Vec<Field> = core().iter().flat_map(|(file, text)| fields_of_all(file, text)).collect();
    for (plain, reason) in PLAIN_DATA {
        assert!(
            fields.iter().any(|field| field.of == plain),
            "{plain} ({reason}) has no such field: remove it from the list"
        );
    }
    let is_listed = |field: &Field| PLAIN_DATA.iter().any(|(plain, _)| *plain == field.of);
    let open: Vec<Field> = fields.into_iter().filter(|field| !is_listed(field)).collect();
    assert!(open.is_empty(), "fields that the whole crate may change:\n{}", listed(&open));
}

/// Returns all crates by name.
fn crates() -> BTreeMap<String, Files> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../crates");
    let folders = fs::read_dir(folder).expect("the crates").map(|entry| entry.expect("readable").path());
    let name = |path: &Path| path.file_name().expect("a name").to_string_lossy().into_owned();
    folders.map(|path| (name(&path), files(&path.join("src")))).collect()
}

fn core() -> Files {
    files(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../crates/symmalloc-core/src"))
}

/// Reads the sources in a folder, without the unit tests, which are files named `tests.rs`.
fn files(source: &Path) -> Files {
    let mut files = Files::new();
    let mut folders = vec![PathBuf::new()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(source.join(&folder)).expect("a folder of sources") {
            let path = folder.join(entry.expect("readable").file_name());
            if source.join(&path).is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") && !path.ends_with("tests.rs") {
                let text = fs::read_to_string(source.join(&path)).expect("text");
                files.insert(path.to_str().expect("plain names").to_owned(), text);
            }
        }
    }
    assert!(files.contains_key("lib.rs"), "{} is not a library", source.display());
    files
}

fn listed(lines: &[impl fmt::Display]) -> String {
    lines.iter().map(|line| format!("  {line}\n")).collect()
}

fn top(files: &Files) -> BTreeSet<&str> {
    files.keys().map(|path| path.split('/').next().expect("a first part").trim_end_matches(".rs")).collect()
}

/// A field that is `pub(crate)`.
#[derive(Debug, PartialEq, Eq)]
struct Field {
    /// File and struct, as `file.rs Struct`.
    of: String,
    line: usize,
    name: String,
}

impl fmt::Display for Field {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, line {}: {}", self.of, self.line, self.name)
    }
}

fn fields_of_all(file: &str, text: &str) -> Vec<Field> {
    let items = ["async", "const", "enum", "extern", "fn", "mod", "static", "struct", "trait", "type", "unsafe", "use"];
    let (mut fields, mut owner) = (Vec::new(), "");
    for at in tokens(text).windows(5) {
        let [word, open, of, close, name] = [0, 1, 2, 3, 4].map(|number| at[number].text);
        if word == "struct" {
            owner = open;
        }
        if [word, open, of, close] == ["pub", "(", "crate", ")"] && !items.contains(&name) {
            fields.push(Field { of: format!("{file} {owner}"), line: at[4].line, name: name.into() });
        }
    }
    fields
}

/// A use of one file by another.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Arrow {
    from: String,
    line: usize,
    to: String,
}

impl Arrow {
    fn runs_up(&self) -> bool {
        let place = |path: &str| {
            let top = path.split('/').next().expect("a first part");
            MODULES.iter().position(|name| *name == top.trim_end_matches(".rs")).unwrap_or(MODULES.len())
        };
        place(&self.to) > place(&self.from)
    }
}

impl fmt::Display for Arrow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{} -> {}", self.from, self.line, self.to)
    }
}

/// Returns the groups of files that all reach each other, as text.
fn circles(arrows: &[Arrow]) -> Vec<String> {
    let reached = |from: &str| {
        let (mut reached, mut open) = (BTreeSet::new(), vec![from]);
        while let Some(file) = open.pop() {
            for arrow in arrows.iter().filter(|arrow| arrow.from == file) {
                if reached.insert(arrow.to.as_str()) {
                    open.push(&arrow.to);
                }
            }
        }
        reached
    };
    let reach: BTreeMap<&str, BTreeSet<&str>> =
        arrows.iter().map(|arrow| arrow.from.as_str()).map(|from| (from, reached(from))).collect();
    let meets = |one: &str, other: &str| {
        reach[one].contains(other) && reach.get(other).is_some_and(|reached| reached.contains(one))
    };
    let groups: BTreeSet<BTreeSet<&str>> = reach
        .keys()
        .filter(|file| meets(file, file))
        .map(|file| reach[file].iter().copied().filter(|other| meets(file, other)).collect())
        .collect();
    let within = |group: &BTreeSet<&str>| {
        let inside = |arrow: &&Arrow| group.contains(arrow.from.as_str()) && group.contains(arrow.to.as_str());
        arrows.iter().filter(inside).map(Arrow::to_string).collect::<Vec<_>>().join(", ")
    };
    groups.iter().map(within).collect()
}

/// Returns the uses between files, one per pair.
fn arrows(files: &Files) -> Vec<Arrow> {
    let modules: BTreeMap<Vec<&str>, Module<'_>> = files
        .iter()
        .filter(|(file, _)| *file != "main.rs")
        .map(|(file, text)| (module_path(file), Module::read(file, text)))
        .collect();
    let mut arrows = BTreeMap::new();
    for (path, module) in &modules {
        for (name, line) in &module.paths {
            let Some(to) = resolve(&modules, path, name, 0) else { continue };
            let is_own_export = name.is_export && to.starts_with(path) && !module.words.contains(name.last());
            if to != *path && !is_own_export {
                arrows.entry((module.file, modules[&to].file)).or_insert(*line);
            }
        }
    }
    arrows.into_iter().map(|((from, to), line)| Arrow { from: from.into(), line, to: to.into() }).collect()
}

/// Returns the module path of a file: `a/b.rs` and `a/b/mod.rs` are `a::b`.
fn module_path(file: &str) -> Vec<&str> {
    let stem = file.strip_suffix(".rs").expect("a source file");
    let stem = stem.strip_suffix("/mod").unwrap_or(stem);
    if stem == "lib" { Vec::new() } else { stem.split('/').collect() }
}

/// Returns the module that defines the last part of a path, as far as the text shows; `None` for another crate.
fn resolve<'a>(
    modules: &BTreeMap<Vec<&'a str>, Module<'a>>,
    from: &[&'a str],
    name: &Name<'a>,
    depth: usize,
) -> Option<Vec<&'a str>> {
    let mut parts = name.parts.iter().copied().peekable();
    let mut at = from.to_vec();
    match *parts.peek()? {
        "crate" => at.clear(),
        "super" | "self" => {}
        first => {
            let child = [from, &[first]].concat();
            modules.get(&child)?;
        }
    }
    for part in parts {
        let child = [&at[..], &[part]].concat();
        match part {
            "crate" | "self" => {}
            "super" => {
                at.pop()?;
            }
            _ if modules.contains_key(&child) => at = child,
            _ => {
                // Not a module: defined in this file, or exported from another module.
                let exports = modules.get(&at)?.paths.iter().map(|(name, _)| name).filter(|name| name.is_export);
                let mut candidates = exports.filter(|export| export.called == part || export.called == "*");
                let found = candidates.find_map(|export| {
                    if depth > 8 {
                        return None;
                    }
                    let to = resolve(modules, &at, export, depth + 1)?;
                    (export.called == part || modules[&to].words.contains(part)).then_some(to)
                });
                let Some(found) = found else { return Some(at) };
                at = found;
            }
        }
    }
    modules.contains_key(&at).then_some(at)
}

/// A path that a file names.
struct Name<'a> {
    parts: Vec<&'a str>,
    /// Name of the path in the file; `*` for all names of the module.
    called: &'a str,
    is_export: bool,
}

impl<'a> Name<'a> {
    fn last(&self) -> &'a str {
        self.called
    }
}

struct Module<'a> {
    file: &'a str,
    /// Paths with their lines.
    paths: Vec<(Name<'a>, usize)>,
    /// Every word outside of `use` declarations.
    words: BTreeSet<&'a str>,
}

impl<'a> Module<'a> {
    fn read(file: &'a str, text: &'a str) -> Self {
        let tokens = tokens(text);
        let mut module = Module { file, paths: Vec::new(), words: BTreeSet::new() };
        let mut at = 0;
        while at < tokens.len() {
            if tokens[at].text == "use" && tokens.get(at + 1).is_some_and(|next| next.text != "<") {
                let is_export = at > 0 && ["pub", ")"].contains(&tokens[at - 1].text);
                at += 1;
                module.read_use(&tokens, &mut at, &[], is_export);
            } else {
                module.read_path(&tokens, &mut at);
            }
        }
        module
    }

    /// Reads `a::b`, `a::b as c`, `a::*` or `a::{b, c::d}`, and moves past it.
    fn read_use(&mut self, tokens: &[Token<'a>], at: &mut usize, before: &[&'a str], is_export: bool) {
        let mut parts = before.to_vec();
        let line = tokens[*at].line;
        while let Some(token) = tokens.get(*at) {
            *at += 1;
            match token.text {
                "::" => {}
                "{" => {
                    while tokens.get(*at).is_some_and(|token| token.text != "}") {
                        self.read_use(tokens, at, &parts, is_export);
                        *at += usize::from(tokens.get(*at).is_some_and(|token| token.text == ","));
                    }
                    *at += 1;
                    return;
                }
                "," | "}" | ";" => {
                    *at -= 1;
                    break;
                }
                part => parts.push(part),
            }
        }
        let mut called = parts.last().copied().unwrap_or("");
        if let [.., _, "as", _] = parts[..] {
            parts.truncate(parts.len() - 2);
        }
        if ["self", "*"].contains(&parts.last().copied().unwrap_or("")) && parts.len() > 1 {
            parts.pop();
            if called == "self" {
                called = parts[parts.len() - 1];
            }
        }
        self.paths.push((Name { parts, called, is_export }, line));
    }

    /// Reads a path in code, or a token that begins none, and moves past it.
    fn read_path(&mut self, tokens: &[Token<'a>], at: &mut usize) {
        let (line, mut parts) = (tokens[*at].line, vec![tokens[*at].text]);
        self.words.insert(tokens[*at].text);
        *at += 1;
        while tokens.get(*at).is_some_and(|token| token.text == "::") && tokens.get(*at + 1).is_some_and(Token::is_word)
        {
            parts.push(tokens[*at + 1].text);
            self.words.insert(tokens[*at + 1].text);
            *at += 2;
        }
        if parts.len() > 1 {
            let called = parts[parts.len() - 1];
            self.paths.push((Name { parts, called, is_export: false }, line));
        }
    }
}

#[derive(Clone, Copy, Debug)]
struct Token<'a> {
    text: &'a str,
    line: usize,
}

impl Token<'_> {
    fn is_word(&self) -> bool {
        self.text.starts_with(is_word)
    }
}

fn is_word(c: char) -> bool {
    c == '_' || c.is_alphanumeric()
}

/// Splits text into words, `::` and single characters, without comments, strings, characters and test modules.
fn tokens(text: &str) -> Vec<Token<'_>> {
    let mut tokens: Vec<Token<'_>> = Vec::new();
    let (mut rest, mut line) = (text, 1);
    while let Some(first) = rest.chars().next() {
        let length = if rest.starts_with("//") {
            rest.find('\n').unwrap_or(rest.len())
        } else if rest.starts_with("/*") {
            rest.find("*/").map_or(rest.len(), |end| end + 2)
        } else if let Some(length) = literal(rest) {
            length
        } else if first.is_whitespace() {
            first.len_utf8()
        } else {
            let word = rest.find(|c| !is_word(c)).unwrap_or(rest.len());
            let length = if word > 0 {
                word
            } else if rest.starts_with("::") {
                2
            } else {
                first.len_utf8()
            };
            tokens.push(Token { text: &rest[..length], line });
            length
        };
        line += rest[..length].matches('\n').count();
        rest = &rest[length..];
    }
    without_tests(&tokens)
}

/// Returns the length of the string or character literal at the beginning of the text. A lifetime is neither.
fn literal(text: &str) -> Option<usize> {
    let raw = text.strip_prefix('b').unwrap_or(text);
    if let Some(hashes) = raw.strip_prefix('r').map(|text| text.len() - text.trim_start_matches('#').len())
        && raw[1 + hashes..].starts_with('"')
    {
        let end = format!("\"{}", "#".repeat(hashes));
        let begin = text.len() - raw.len() + 2 + hashes;
        return Some(text[begin..].find(&end).map_or(text.len(), |at| begin + at + end.len()));
    }
    let quote = text.chars().next().filter(|quote| ['"', '\''].contains(quote))?;
    let mut escaped = false;
    let end = text[1..].find(|c| {
        let is_end = c == quote && !escaped;
        escaped = c == '\\' && !escaped;
        is_end
    });
    let length = end.map_or(text.len(), |end| end + 2);
    let is_character = || text[1..].starts_with('\\') || text[..length].chars().count() == 3;
    if quote == '"' || is_character() { Some(length) } else { None }
}

fn without_tests<'a>(tokens: &[Token<'a>]) -> Vec<Token<'a>> {
    let mut kept = Vec::new();
    let mut at = 0;
    while at < tokens.len() {
        let begins = |words: &[&str]| {
            tokens.len() >= at + words.len() && tokens[at..].iter().zip(words).all(|(token, word)| token.text == *word)
        };
        if begins(&["#", "[", "cfg", "(", "test", ")", "]"]) || begins(&["#", "[", "cfg", "(", "doctest", ")", "]"]) {
            // The attribute, and the item after it up to its semicolon or last brace.
            at += 7;
            let mut depth = 0;
            while at < tokens.len() {
                depth += match tokens[at].text {
                    "{" => 1,
                    "}" => -1,
                    _ => 0,
                };
                at += 1;
                if depth == 0 && [";", "}"].contains(&tokens[at - 1].text) {
                    break;
                }
            }
        } else {
            kept.push(tokens[at]);
            at += 1;
        }
    }
    kept
}

/// Tests of this reader on synthetic trees.
mod reader {
    use super::*;

    fn tree(files: &[(&str, &str)]) -> Files {
        files.iter().map(|(path, text)| ((*path).to_owned(), (*text).to_owned())).collect()
    }

    fn seen(files: &[(&str, &str)]) -> Vec<String> {
        arrows(&tree(files)).iter().map(Arrow::to_string).collect()
    }

    #[test]
    fn references_to_later_modules_are_found_in_imports_and_in_code() {
        let files = tree(&[
            ("lib.rs", "mod heap; mod types; pub use heap::Heap;"),
            ("types/mod.rs", "pub mod ids;\npub mod units;"),
            ("types/ids.rs", "use std::fmt;\n\nuse crate::{\n    types::units,\n    heap::Heap,\n};"),
            ("types/units.rs", "fn f() { crate::heap::grow() }"),
            ("heap/mod.rs", "use crate::types::{ids::{self, Id}, units::Units as U};"),
        ]);
        let up: Vec<String> = arrows(&files).iter().filter(|arrow| arrow.runs_up()).map(Arrow::to_string).collect();
        assert_eq!(up, ["types/ids.rs:5 -> heap/mod.rs", "types/units.rs:1 -> heap/mod.rs"]);
        let root = seen(&[("lib.rs", "mod types; pub struct S;"), ("types.rs", "use crate::S;")]);
        assert_eq!(root, ["types.rs:1 -> lib.rs"]);
        assert!(Arrow { from: "types.rs".into(), line: 1, to: "lib.rs".into() }.runs_up());
    }

    #[test]
    fn comments_strings_and_tests_are_ignored() {
        let text = "//! [`crate::heap`]\n/* use crate::heap; */ const A: &str = \"crate::heap\"; const B: &str = r#\"\"crate::heap\"#;
            fn f<'a>(c: &'a char) -> bool { *c == '\"' || *c == '\\'' }
            #[cfg(test)] use crate::heap::Heap;
            #[cfg(test)]\nmod tests { use crate::heap::Heap; fn f() { crate::heap::grow() } }
            use crate::last;";
        let files = [("lib.rs", ""), ("a.rs", text), ("heap.rs", ""), ("last.rs", "")];
        assert_eq!(seen(&files), ["a.rs:7 -> last.rs"]);
    }

    #[test]
    fn a_name_is_followed_to_the_file_that_defines_it() {
        let files = [
            ("lib.rs", "mod a; mod b; pub use a::Deep;"),
            ("a/mod.rs", "mod deep;\nmod all;\npub(crate) use deep::Deep; pub use all::*;"),
            ("a/deep.rs", "pub struct Deep;"),
            ("a/all.rs", "pub fn some() {}"),
            ("b.rs", "use crate::a::Deep;\nuse crate::a::some;\nfn f() { super::a::other() }"),
            ("c.rs", "use crate::Deep;"),
        ];
        let expected = ["b.rs:2 -> a/all.rs", "b.rs:1 -> a/deep.rs", "b.rs:3 -> a/mod.rs", "c.rs:1 -> a/deep.rs"];
        assert_eq!(seen(&files), expected);
    }

    #[test]
    fn a_cycle_is_found_and_a_re_export_is_not_one() {
        let child = ("a/child.rs", "use super::Parent;\npub struct Child;");
        let around = |parent| circles(&arrows(&tree(&[("lib.rs", ""), ("a/mod.rs", parent), child])));
        assert!(around("mod child; pub use child::Child; pub struct Parent;").is_empty());
        let circle = ["a/child.rs:1 -> a/mod.rs, a/mod.rs:1 -> a/child.rs"];
        assert_eq!(around("mod child; use child::Child; pub struct Parent(Child);"), circle);
        assert_eq!(around("mod child; pub struct Parent(child::Child);"), circle);
        assert_eq!(around("mod child; pub use child::Child; pub struct Parent(Child);"), circle);
        let three = [
            ("lib.rs", ""),
            ("a.rs", "use crate::b;"),
            ("b.rs", "use crate::c;"),
            ("c.rs", "use crate::{a, d};"),
            ("d.rs", ""),
        ];
        assert_eq!(circles(&arrows(&tree(&three))), ["a.rs:1 -> b.rs, b.rs:1 -> c.rs, c.rs:1 -> a.rs"]);
    }

    #[test]
    fn a_crate_visible_field_is_found() {
        let text = "pub(crate) struct S {\n    own: u8,\n    pub(crate) open: u8,\n}\npub(crate) struct T(pub(crate) u8);\npub(crate) fn f() {}";
        let found: Vec<String> = fields_of_all("a.rs", text).iter().map(Field::to_string).collect();
        assert_eq!(found, ["a.rs S, line 3: open", "a.rs T, line 5: u8"]);
        let files = tree(&[("a/b.rs", text), ("a/c.rs", ""), ("b.rs", "")]);
        assert_eq!(top(&files).len(), 2);
    }
}
