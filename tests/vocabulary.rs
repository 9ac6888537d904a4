//! The names in the code equal those in `docs/events.md`: events, spans and metrics with their levels, fields, kinds and units. Programs,
//! dashboards and alerts rely on them. The search through the library code also checks a rule for threads.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// Properties of each name: for an event `["debug", "pool", "stream"]`.
type Vocabulary = BTreeMap<String, Vec<String>>;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the workspace").to_owned()
}

/// Returns the library code of all crates, file by file.
fn sources() -> Vec<(PathBuf, String)> {
    let mut files = Vec::new();
    let crates = fs::read_dir(root().join("crates")).expect("the crates");
    let mut folders: Vec<PathBuf> =
        crates.map(|entry| entry.expect("it should be readable").path().join("src")).collect();
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).into_iter().flatten() {
            let path = entry.expect("it should be readable").path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let text = fs::read_to_string(&path).expect("the contents should be UTF-8");
                files.push((path, text));
            }
        }
    }
    assert!(files.len() > 100, "the crates were not found");
    files
}

/// Returns the arguments of every call that begins with `opening`, which ends with its parenthesis, and the text before the call.
fn calls<'a>(text: &'a str, opening: &'a str) -> impl Iterator<Item = (&'a str, Vec<String>)> {
    text.match_indices(opening).map(move |(at, _)| (&text[..at], arguments(&text[at + opening.len()..])))
}

/// Splits the text up to the closing parenthesis at commas.
fn arguments(text: &str) -> Vec<String> {
    let (mut list, mut current, mut depth, mut quoted) = (Vec::new(), String::new(), 0, false);
    for c in text.chars() {
        match c {
            '"' => quoted = !quoted,
            _ if quoted => {}
            '(' | '[' | '{' => depth += 1,
            ')' if depth == 0 => break,
            ')' | ']' | '}' => depth -= 1,
            ',' if depth == 0 => {
                list.push(std::mem::take(&mut current).trim().to_owned());
                continue;
            }
            _ => {}
        }
        current.push(c);
    }
    list.push(current.trim().to_owned());
    list.retain(|argument| !argument.is_empty());
    list
}

fn literal(argument: &str) -> Option<&str> {
    argument.strip_prefix('"')?.strip_suffix('"')
}

/// Adds a name. Each name has one meaning.
fn add(vocabulary: &mut Vocabulary, name: &str, output: &[String], path: &Path) {
    let known = vocabulary.insert(name.to_owned(), output.to_owned());
    assert!(known.is_none_or(|known| known == output), "{name} has two meanings, in {} and elsewhere", path.display());
}

/// Returns the events or spans that the code emits.
fn emitted(suffix: &str) -> Vocabulary {
    let mut vocabulary = Vocabulary::new();
    for (path, text) in sources() {
        for level in ["error", "warn", "info", "debug", "trace"] {
            for (before, arguments) in calls(&text, &format!("tracing::{level}{suffix}!(")) {
                let place = path.display();
                let (mut names, mut output, mut has_target) = (Vec::new(), vec![level.to_owned()], false);
                for argument in &arguments {
                    if let Some(name) = argument.strip_prefix("name: ") {
                        match literal(name) {
                            Some(name) => names.push(name.to_owned()),
                            None => names.extend(names_given_to_macro(before, &text)),
                        }
                    } else if let Some(target) = argument.strip_prefix("target: ") {
                        has_target = literal(target) == Some("symmalloc");
                    } else if let Some(text) = literal(argument) {
                        if !suffix.is_empty() {
                            names.push(text.to_owned());
                        }
                    } else {
                        let field = argument.split('=').next().unwrap_or_default().trim();
                        output.push(field.trim_start_matches(['%', '?']).to_owned());
                    }
                }
                assert!(has_target && !names.is_empty(), "{place}: no target or no name in {arguments:?}");
                names.iter().for_each(|name| add(&mut vocabulary, name, &output, &path));
            }
        }
    }
    vocabulary
}

/// Returns the event names with which a macro is called. The macro is the last one whose definition begins in `before`.
fn names_given_to_macro(before: &str, text: &str) -> Vec<String> {
    let definition = before.rsplit_once("macro_rules! ").expect("only a macro takes its name from elsewhere").1;
    let name = definition.split([' ', '{']).next().expect("a macro has a name");
    calls(text, &format!("{name}!(")).filter_map(|(_, given)| Some(literal(given.first()?)?.to_owned())).collect()
}

/// Returns the metrics that the code publishes.
fn published() -> Vocabulary {
    let mut vocabulary = Vocabulary::new();
    for (path, text) in sources() {
        for kind in ["gauge", "counter", "histogram"] {
            for (_, arguments) in calls(&text, &format!("Metric::{kind}(")) {
                let [name, unit, _help] = &arguments[..] else { panic!("{}: {arguments:?}", path.display()) };
                let unit = match unit.rsplit("Unit::").next().expect("always one part").trim_end_matches(')') {
                    "None" => String::new(),
                    unit => unit.to_lowercase(),
                };
                let name = literal(name).expect("it should have a name");
                assert!(
                    vocabulary.insert(name.to_owned(), vec![kind.to_owned(), unit]).is_none(),
                    "{name} exists twice"
                );
            }
        }
    }
    vocabulary
}

/// Returns the rows of the table on a page whose first column has this heading: the code in that column, then in the next `columns`.
fn documented(page: &str, head: &str, columns: usize) -> Vocabulary {
    let page = fs::read_to_string(root().join("docs").join(page)).expect("the page");
    let mut vocabulary = Vocabulary::new();
    let rows = page.lines().skip_while(|line| !line.starts_with(&format!("| {head} |"))).skip(2);
    for row in rows.take_while(|line| line.starts_with('|')) {
        let mut cells = row.trim_matches('|').split('|').map(|cell| cell.trim_matches([' ', '`']));
        let name = cells.next().expect("a first column");
        let output = cells.take(columns).flat_map(|cell| cell.split("`, `").map(str::to_owned));
        let output: Vec<String> = output.collect();
        assert!(vocabulary.insert(name.to_owned(), output).is_none(), "{name} is documented twice");
    }
    assert!(!vocabulary.is_empty(), "no table of {head}s");
    vocabulary
}

#[track_caller]
fn assert_same(code: &Vocabulary, page: &Vocabulary) {
    let names: BTreeSet<&String> = code.keys().chain(page.keys()).collect();
    let differing: Vec<&String> = names.into_iter().filter(|name| code.get(*name) != page.get(*name)).collect();
    let say =
        |name: &String| format!("{name}\n  in the code: {:?}\n  on the page: {:?}", code.get(name), page.get(name));
    assert!(differing.is_empty(), "{}", differing.into_iter().map(say).collect::<Vec<_>>().join("\n"));
}

/// Removes empty fields, which come from empty cells.
fn without_empty(mut vocabulary: Vocabulary) -> Vocabulary {
    vocabulary.values_mut().for_each(|output| output.retain(|word| !word.is_empty()));
    vocabulary
}

#[test]
fn every_event_is_documented_with_its_level_and_fields() {
    assert_same(&emitted(""), &without_empty(documented("events.md", "event", 2)));
}

#[test]
fn every_span_is_documented_with_its_level_and_fields() {
    assert_same(&emitted("_span"), &without_empty(documented("events.md", "span", 2)));
}

#[test]
fn every_metric_is_documented_with_its_kind_and_unit() {
    assert_same(&published(), &documented("events.md", "metric", 2));
}

#[test]
fn arguments_are_split_at_top_level_commas() {
    assert_eq!(arguments("a, b = f(1, 2), \"c, (d\", %e) rest)"), ["a", "b = f(1, 2)", "\"c, (d\"", "%e"]);
}

/// At the limit on threads, `std::thread::spawn` and `Scope::spawn` panic, and the methods of `std::thread::Builder` return an error.
#[test]
fn every_thread_of_a_library_may_be_refused() {
    let is_of_tests = |path: &Path| {
        path.components().any(|part| part.as_os_str() == "symmalloc-conformance")
            || path.parent().is_some_and(|folder| folder.ends_with("src/tests"))
            || path.file_stem().is_some_and(|name| name == "tests" || name == "random_jobs")
    };
    let mut builders = 0;
    for (path, text) in sources().into_iter().filter(|(path, _)| !is_of_tests(path)) {
        let code = text.split("#[cfg(test)]\nmod tests").next().expect("a first part");
        let lines = code.lines().filter(|line| !line.trim_start().starts_with("//"));
        for line in lines {
            builders += usize::from(line.contains("thread::Builder::new()"));
            let panics = line.contains("thread::spawn(") || line.contains("scope.spawn(");
            assert!(!panics, "{}: use std::thread::Builder, and handle its error: {line}", path.display());
        }
    }
    assert!(builders > 5, "the threads were not found");
}
