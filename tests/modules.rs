//! House rules for the source text: the order of each crate's modules, no import cycles between files, few modules at the top of the core,
//! one convention for modules, and fields of the core that are private to their file.

#[path = "modules/imports.rs"]
mod imports;

use imports::{Crate, Field, Files, Import};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

/// The top-level modules of each crate. A module may use itself and those before it, and `lib.rs` uses all.
const ORDER: [(&str, &str); 17] = [
    ("symmalloc", ""),
    (
        "symmalloc-agreement",
        "point protocol ranks transport message threads question directory found rank_history report cause outcome policies search \
         inquiry exchange agree mode",
    ),
    (
        "symmalloc-cli",
        "verdict content quantity escape progress streams format collection beginning address_order job config_text timing args error \
         input destination recorded output picture diff explorer planned chart plan export import address manual replay simulate report run",
    ),
    ("symmalloc-conformance", ""),
    (
        "symmalloc-core",
        "types sync config streams blocks history stats pointers ledger arena plans stitching sleep heap allocator metrics",
    ),
    (
        "symmalloc-cuda",
        "call_counters error_names loading resize error library driver device memory streams backend pools allocator device_memory \
         buffers graphs sharing sleep metrics",
    ),
    ("symmalloc-files", "forks private_folder signals draft stderr"),
    (
        "symmalloc-import",
        "options compression stacks trace_naming held_memory held_records pickle rerun export summary trace_file perfetto transcript \
         out_of_memory pytorch rmm error recording",
    ),
    (
        "symmalloc-nccl",
        "ffi backoff logging unique_id watchdog communicator collectives windows sync registrar sleep all_to_all",
    ),
    (
        "symmalloc-plan",
        "problem schedule random learner solution decode online sections repair table exact corners solve",
    ),
    (
        "symmalloc-preload",
        "settings forks outcome numbers ledger tally pools recordings libc_symbols libcuda context live peers contexts captures \
         streams served watch exit ending served_call calls interposed",
    ),
    (
        "symmalloc-rendezvous",
        "deadline sequence version launch error store secret folder handshake endpoint idle torch_store interfaces admission search own card \
         meeting place",
    ),
    ("symmalloc-sim", "device job"),
    ("symmalloc-text", ""),
    (
        "symmalloc-torch",
        "status settings peak shared_chunks error guard handles mempools streams memory_events refusal trace registrations scopes device \
         alignment pool_memory process sleep statistics unordered c_interface pytorch",
    ),
    ("symmalloc-trace", "text trace layout plan replay"),
    ("symmalloc-watchdog", "ids connection threads message flight_record findings roster endpoint lifeline watching"),
];

/// Maximum number of top-level modules of the core.
const CORE_MODULES_MAX: usize = 16;

/// Structs of the core whose fields are visible in the whole crate, each with the reason. All other structs keep their fields private to
/// their file.
const PLAIN_DATA: [(&str, &str); 20] = [
    ("arena/fencing.rs Context", "parameters of heap operations"),
    ("arena.rs Removed", "a result"),
    ("blocks/table.rs Block", "a row of the table, filled in by the arena and the free index"),
    ("blocks/table.rs Segment", "a row of the table"),
    ("config/size_rules.rs SizeRules", "immutable once created"),
    ("heap.rs Freed", "a result"),
    ("heap/debug.rs Debugged", "a result"),
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
    ("stitching.rs Run", "a value"),
    ("streams/fences.rs Fence", "a value"),
];

static CRATES: LazyLock<BTreeMap<String, Crate>> = LazyLock::new(|| {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../crates");
    let folders = fs::read_dir(folder).expect("the crates").map(|entry| entry.expect("it should be readable").path());
    let name = |path: &Path| path.file_name().expect("it should have a name").to_string_lossy().into_owned();
    folders.map(|path| (name(&path), Crate::read(&files(&path.join("src"))))).collect()
});

/// Reads the sources in a folder.
fn files(source: &Path) -> Files {
    let mut files = Files::new();
    let mut folders = vec![PathBuf::new()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(source.join(&folder)).expect("a folder of sources") {
            let path = folder.join(entry.expect("it should be readable").file_name());
            if source.join(&path).is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let text = fs::read_to_string(source.join(&path)).expect("the contents should be UTF-8");
                files.insert(path.to_str().expect("plain names").to_owned(), text);
            }
        }
    }
    assert!(files.contains_key("lib.rs"), "{} is not a library", source.display());
    files
}

#[test]
fn each_crate_declares_the_order_of_all_its_modules() {
    let names: Vec<&str> = ORDER.iter().map(|(name, _)| *name).collect();
    assert_eq!(names, CRATES.keys().collect::<Vec<_>>(), "ORDER lists each crate once, by name");
    for (name, order) in ORDER {
        let mut declared: Vec<&str> = order.split_whitespace().collect();
        declared.sort_unstable();
        assert_eq!(declared, CRATES[name].modules(), "ORDER lists each top-level module of {name} once");
    }
}

#[test]
fn modules_use_only_those_before_them() {
    for (name, order) in ORDER {
        let upward = upward(&CRATES[name], order);
        assert!(upward.is_empty(), "a module of {name} uses a later one:\n{}", listed(&upward));
    }
}

#[test]
fn imports_between_files_are_acyclic() {
    let (mut count, mut found) = (0, Vec::new());
    for (name, source) in &*CRATES {
        let imports = source.imports();
        count += imports.len();
        found.extend(circles(&imports).iter().map(|circle| format!("{name}: {circle}")));
    }
    assert!(count > 2000, "the imports were not read: {count}");
    assert!(found.is_empty(), "files use each other in a circle:\n{}", listed(&found));
}

#[test]
fn a_module_with_children_is_a_file_next_to_their_folder() {
    let files = CRATES.iter().flat_map(|(name, source)| source.sources().map(move |source| (name, &source.file)));
    let others = files.filter(|(_, file)| file.ends_with("/mod.rs")).map(|(name, file)| format!("{name}: {file}"));
    let others: Vec<String> = others.collect();
    assert!(others.is_empty(), "the convention is `a.rs` with `a/`, not `a/mod.rs`:\n{}", listed(&others));
}

#[test]
fn the_core_has_few_top_level_modules() {
    let modules = CRATES["symmalloc-core"].modules();
    assert!(modules.len() <= CORE_MODULES_MAX, "{} modules at the top of the core: {modules:?}", modules.len());
}

#[test]
fn fields_in_the_core_are_private_to_their_file() {
    let fields: Vec<&Field> = CRATES["symmalloc-core"].sources().flat_map(|source| &source.crate_fields).collect();
    for (plain, reason) in PLAIN_DATA {
        assert!(
            fields.iter().any(|field| field.of == plain),
            "{plain} ({reason}) has no such field: remove it from the list"
        );
    }
    let is_listed = |field: &&Field| PLAIN_DATA.iter().any(|(plain, _)| *plain == field.of);
    let open: Vec<&Field> = fields.into_iter().filter(|field| !is_listed(field)).collect();
    assert!(open.is_empty(), "fields that the whole crate may change:\n{}", listed(&open));
}

fn listed(lines: &[impl fmt::Display]) -> String {
    lines.iter().map(|line| format!("  {line}\n")).collect()
}

/// Returns the imports of modules that come later in the order.
fn upward(source: &Crate, order: &str) -> Vec<Import> {
    let order: Vec<&str> = order.split_whitespace().collect();
    let place = |file: &str| {
        let module = file.split('/').next().map(|module| module.trim_end_matches(".rs"));
        order.iter().position(|name| Some(*name) == module).unwrap_or(order.len())
    };
    source.imports().into_iter().filter(|import| place(&import.to) > place(&import.from)).collect()
}

/// Returns the groups of files that all reach each other, as text.
fn circles(imports: &[Import]) -> Vec<String> {
    let reached = |from: &str| {
        let (mut reached, mut open) = (BTreeSet::new(), vec![from]);
        while let Some(file) = open.pop() {
            for import in imports.iter().filter(|import| import.from == file) {
                if reached.insert(import.to.as_str()) {
                    open.push(&import.to);
                }
            }
        }
        reached
    };
    let reach: BTreeMap<&str, BTreeSet<&str>> =
        imports.iter().map(|import| import.from.as_str()).map(|from| (from, reached(from))).collect();
    let meets = |one: &str, other: &str| {
        reach[one].contains(other) && reach.get(other).is_some_and(|reached| reached.contains(one))
    };
    let groups: BTreeSet<BTreeSet<&str>> = reach
        .keys()
        .filter(|file| meets(file, file))
        .map(|file| reach[file].iter().copied().filter(|other| meets(file, other)).collect())
        .collect();
    let within = |group: &BTreeSet<&str>| {
        let inside = |import: &&Import| group.contains(import.from.as_str()) && group.contains(import.to.as_str());
        imports.iter().filter(inside).map(Import::to_string).collect::<Vec<_>>().join(", ")
    };
    groups.iter().map(within).collect()
}

/// Plants: each rule catches a violation in small sources.
mod plants {
    use super::*;

    fn read(files: &[(&str, &str)]) -> Crate {
        Crate::read(&files.iter().map(|(path, text)| ((*path).to_owned(), (*text).to_owned())).collect())
    }

    fn shown(imports: &[Import]) -> Vec<String> {
        imports.iter().map(Import::to_string).collect()
    }

    #[test]
    fn an_upward_import_is_found_in_each_form() {
        let root = ("lib.rs", "mod low;\nmod high;\npub use high::{Name, deep::Deep as Other};\npub struct Root;");
        let high = ("high.rs", "pub mod deep;\npub struct Name;\npub fn call() {}");
        let deep = ("high/deep.rs", "pub struct Deep;");
        for (low, to) in [
            ("use crate::high;", "high.rs"),
            ("use super::high::Name;", "high.rs"),
            ("pub(crate) use crate::high::Name;", "high.rs"),
            ("use {std::fmt, crate::{high::{self, Name as N}}};", "high.rs"),
            ("use crate::{\nhigh::deep::Deep,\n};", "high/deep.rs"),
            ("use crate::high::*;", "high.rs"),
            ("use crate::Name;", "high.rs"),
            ("use crate::Other;", "high/deep.rs"),
            ("use crate::Root;", "lib.rs"),
            ("fn f() { use crate::high::Name; }", "high.rs"),
            ("fn f() { crate::high::call() }", "high.rs"),
            ("fn f(of: &Vec<crate::Name>) {}", "high.rs"),
            ("fn f() -> Option<<crate::high::deep::Deep as Iterator>::Item> { None }", "high/deep.rs"),
            ("fn f() { assert!(g(crate::high::call())) }", "high.rs"),
            ("macro_rules! m { () => { $crate::high::call() } }", "high.rs"),
            ("macro_rules! m { () => { use $crate::{low, high::{self}}; } }", "high.rs"),
            ("#[error(\"{}\", crate::high::call())]\nstruct E;", "high.rs"),
            ("mod inner { fn f() { super::super::high::call() } }", "high.rs"),
            ("impl S { fn f() { crate::high::call() } }", "high.rs"),
            ("#[cfg(not(test))] use crate::high;", "high.rs"),
            ("#[cfg(any(test, unix))] use crate::high;", "high.rs"),
        ] {
            let files = read(&[root, high, deep, ("low.rs", low)]);
            let found = upward(&files, "low high");
            assert_eq!(
                found.iter().map(|import| (&*import.from, &*import.to)).collect::<Vec<_>>(),
                [("low.rs", to)],
                "{low}"
            );
            assert!(upward(&files, "high low").iter().all(|import| import.to == "lib.rs"), "{low}");
        }
    }

    #[test]
    fn a_name_is_followed_to_the_file_that_defines_it() {
        let files = read(&[
            ("lib.rs", "mod a; mod b; pub use a::Deep;"),
            ("a/mod.rs", "mod deep;\nmod all;\npub(crate) use deep::Deep; pub use all::*;"),
            ("a/deep.rs", "pub struct Deep;"),
            ("a/all.rs", "pub fn some() {}"),
            ("b.rs", "use crate::a::Deep;\nuse crate::a::some;\nfn f() { super::a::other() }"),
            ("c.rs", "use crate::Deep;"),
            ("d.rs", "use crate::a;\nuse a::all as every;\nfn f() { every::some() }"),
            ("e.rs", "use crate::a::{self, Deep};\nfn f() { a::some(); Deep::some() }"),
        ]);
        assert_eq!(
            shown(&files.imports()),
            [
                "b.rs:2 -> a/all.rs",
                "b.rs:1 -> a/deep.rs",
                "b.rs:3 -> a/mod.rs",
                "c.rs:1 -> a/deep.rs",
                "d.rs:2 -> a/all.rs",
                "d.rs:1 -> a/mod.rs",
                "e.rs:2 -> a/all.rs",
                "e.rs:1 -> a/deep.rs",
                "e.rs:1 -> a/mod.rs",
            ]
        );
    }

    #[test]
    fn comments_strings_and_tests_are_ignored() {
        let text = "//! [`crate::heap`]
            /* use crate::heap; */ const A: &str = \"crate::heap\"; const B: &str = r#\"\"crate::heap\"#;
            /// See [crate::heap].
            fn f<'a>(c: &'a char) -> bool { *c == '\"' || *c == '\\'' }
            #[cfg(test)] use crate::heap::Heap;
            #[cfg(all(test, unix))] mod random;
            #[cfg(test)]\nmod tests { use crate::heap::Heap; fn f() { crate::heap::grow() } }
            impl S { #[cfg(doctest)] fn f() { crate::heap::grow() } }
            pub(in crate::heap) struct S;
            use crate::last;";
        let random = ("a/random.rs", "use crate::heap;");
        let deeper = ("a/random/deeper.rs", "use crate::heap;");
        let files = read(&[("lib.rs", ""), ("a.rs", text), random, deeper, ("heap.rs", ""), ("last.rs", "")]);
        assert_eq!(shown(&files.imports()), ["a.rs:11 -> last.rs"]);
        assert_eq!(files.modules(), ["a", "heap", "last"]);
    }

    #[test]
    fn a_circle_of_files_is_found_and_a_reexport_is_not_one() {
        let child = ("a/child.rs", "use super::Parent;\npub struct Child;");
        let around = |parent| circles(&read(&[("lib.rs", ""), ("a.rs", parent), child]).imports());
        assert!(around("mod child; pub use child::Child; pub struct Parent;").is_empty());
        let circle = ["a.rs:1 -> a/child.rs, a/child.rs:1 -> a.rs"];
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
        assert_eq!(circles(&read(&three).imports()), ["a.rs:1 -> b.rs, b.rs:1 -> c.rs, c.rs:1 -> a.rs"]);
    }

    #[test]
    fn a_field_that_the_crate_may_change_is_found() {
        let text =
            "pub(crate) struct S {\n    own: u8,\n    pub(crate) open: u8,\n}\npub(crate) struct T(u8, pub(crate) u8);
            #[cfg(test)]\nstruct U { pub(crate) open: u8 }\npub(crate) fn f() {}";
        let found: Vec<String> =
            read(&[("a.rs", text)]).sources().flat_map(|file| &file.crate_fields).map(Field::to_string).collect();
        assert_eq!(found, ["a.rs S, line 3: open", "a.rs T, line 5: 1"]);
    }
}
