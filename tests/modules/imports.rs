//! The imports of a crate, read from its source text.
//!
//! ```text
//!  text ── syn ──► Source: paths in a file ── resolve ──► file that defines the name ──► Import { from, to }
//! ```
//!
//! A file imports another if it names one of its items: in a `use`, in code, or in the arguments of a macro. Names are followed through
//! imports and reexports, also those of `lib.rs`. Comments, strings, and items that exist only in tests do not count. A file that reexports a
//! child's name does not import it, unless it uses the name elsewhere.

use proc_macro2::{Ident, Span, TokenStream, TokenTree};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use syn::punctuated::Punctuated;
use syn::visit::{self, Visit};
use syn::{
    Attribute, ImplItemFn, Item, ItemFn, ItemImpl, ItemMacro, ItemMod, ItemStruct, ItemUse, Macro, Meta, MetaList,
    Path, Token, UseTree, Visibility,
};

/// Files of a crate: path within `src`, and text.
pub(crate) type Files = BTreeMap<String, String>;

/// Path of a module within its crate.
type ModulePath = Vec<String>;

/// Maximum number of imports and reexports through which a name is followed.
const STEPS_MAX: usize = 8;

/// An import of one file by another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Import {
    pub(crate) from: String,
    pub(crate) line: usize,
    pub(crate) to: String,
}

impl fmt::Display for Import {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{} -> {}", self.from, self.line, self.to)
    }
}

/// The sources of a crate by module, without those that exist only in tests.
pub(crate) struct Crate(BTreeMap<ModulePath, Source>);

/// The module that a name denotes, or that defines it.
struct Target {
    module: ModulePath,
    is_module: bool,
}

impl Crate {
    pub(crate) fn read(files: &Files) -> Self {
        // `main.rs` is the root of another crate.
        let files = files.iter().filter(|(file, _)| *file != "main.rs");
        let mut sources: BTreeMap<ModulePath, Source> =
            files.map(|(file, text)| (module_of(file), Source::read(file, text))).collect();
        let test_modules: Vec<ModulePath> = sources
            .iter()
            .flat_map(|(module, source)| source.test_modules.iter().map(|child| joined(module, child)))
            .collect();
        sources.retain(|module, _| !test_modules.iter().any(|test| module.starts_with(test)));
        Crate(sources)
    }

    pub(crate) fn sources(&self) -> impl Iterator<Item = &Source> {
        self.0.values()
    }

    /// Returns the names of the top-level modules, in alphabetical order.
    pub(crate) fn modules(&self) -> Vec<&str> {
        self.0.keys().filter(|module| module.len() == 1).map(|module| module[0].as_str()).collect()
    }

    /// Returns the imports between files, one for each pair of files.
    pub(crate) fn imports(&self) -> Vec<Import> {
        let mut imports = BTreeMap::new();
        for (module, source) in &self.0 {
            for name in &source.names {
                let Some(to) = self.resolve(module, name, 0) else { continue };
                let is_own_reexport = name.kind == Kind::Reexport
                    && to.module.starts_with(module)
                    && !source.words.contains(&name.called);
                if to.module != *module && !is_own_reexport {
                    imports.entry((&source.file, &self.0[&to.module].file)).or_insert(name.line);
                }
            }
        }
        imports.into_iter().map(|((from, to), line)| Import { from: from.clone(), line, to: to.clone() }).collect()
    }

    /// Follows a name in a file to its definition. Returns `None` for names of other crates.
    fn resolve(&self, from: &ModulePath, name: &Name, steps: usize) -> Option<Target> {
        if steps > STEPS_MAX {
            return None;
        }
        let first = name.parts[0].as_str();
        let (mut at, mut parts) = (from.clone(), name.parts.iter());
        if first == "crate" {
            at.clear();
        } else if !["self", "super"].contains(&first) && !self.0.contains_key(&joined(from, first)) {
            let is_import =
                |other: &&Name| other.kind != Kind::Code && other.called == first && other.parts != name.parts;
            let to = self.resolve(from, self.0[from].names.iter().find(is_import)?, steps + 1)?;
            if !to.is_module {
                return Some(to);
            }
            at = to.module;
            parts.next();
        }
        for part in parts {
            match part.as_str() {
                "crate" | "self" => {}
                "super" => drop(at.pop()?),
                child if self.0.contains_key(&joined(&at, child)) => at.push(child.to_owned()),
                item => match self.reexported(&at, item, steps) {
                    Some(to) if to.is_module => at = to.module,
                    Some(to) => return Some(to),
                    None => return Some(Target { module: at, is_module: false }),
                },
            }
        }
        Some(Target { module: at, is_module: true })
    }

    /// Follows a name that a module reexports. Returns `None` if the module itself defines the name.
    fn reexported(&self, module: &ModulePath, item: &str, steps: usize) -> Option<Target> {
        let reexports = self.0[module].names.iter().filter(|name| name.kind == Kind::Reexport);
        reexports.filter(|name| name.called == item || name.called == "*").find_map(|name| {
            let to = self.resolve(module, name, steps + 1)?;
            (name.called == item || self.0[&to.module].words.contains(item)).then_some(to)
        })
    }
}

fn joined(module: &[String], child: &str) -> ModulePath {
    [module, &[child.to_owned()]].concat()
}

/// Returns the module of a file: `a/b.rs` and `a/b/mod.rs` are `a::b`.
fn module_of(file: &str) -> ModulePath {
    let stem = file.strip_suffix(".rs").expect("a source file");
    let stem = stem.strip_suffix("/mod").unwrap_or(stem);
    if stem == "lib" { Vec::new() } else { stem.split('/').map(str::to_owned).collect() }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// A path outside of `use` declarations.
    Code,
    /// A private `use`.
    Import,
    /// A `use` that is visible elsewhere.
    Reexport,
}

/// A path in a file, of at least two parts or in a `use`.
struct Name {
    parts: Vec<String>,
    /// Name of the path in the file; `*` for all names of a module.
    called: String,
    kind: Kind,
    line: usize,
}

/// Contents of a file.
#[derive(Default)]
pub(crate) struct Source {
    pub(crate) file: String,
    names: Vec<Name>,
    /// Every identifier outside of `use` declarations.
    words: BTreeSet<String>,
    /// Child modules that exist only in tests.
    test_modules: Vec<String>,
    /// Fields that are `pub(crate)`.
    pub(crate) crate_fields: Vec<Field>,
    /// Number of inline modules around the item that is being read.
    depth: usize,
}

/// A field of a struct.
pub(crate) struct Field {
    /// File and struct, as `file.rs Struct`.
    pub(crate) of: String,
    line: usize,
    /// Name, or number in a tuple.
    name: String,
}

impl fmt::Display for Field {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, line {}: {}", self.of, self.line, self.name)
    }
}

impl Source {
    fn read(file: &str, text: &str) -> Self {
        let mut source = Source { file: file.to_owned(), ..Source::default() };
        source.visit_file(&syn::parse_file(text).unwrap_or_else(|error| panic!("{file}: {error}")));
        source
    }

    fn add(&mut self, mut parts: Vec<String>, called: String, kind: Kind, span: Span) {
        // In an inline module, `super` is this file.
        let supers = parts.iter().take_while(|part| *part == "super").count();
        parts.drain(..supers.min(self.depth));
        if !parts.is_empty() {
            self.names.push(Name { parts, called, kind, line: span.start().line });
        }
    }

    /// Adds a path outside of `use` declarations. A single word needs no following: it is an item of this file, or an import.
    fn add_path(&mut self, path: &[Ident]) {
        if let [first, .., last] = path {
            self.add(path.iter().map(Ident::to_string).collect(), last.to_string(), Kind::Code, first.span());
        }
    }

    /// Adds the paths of a `use`: `a::b`, `a::b as c`, `a::*` or `a::{b, c::d}`.
    fn add_use(&mut self, before: &[String], tree: &UseTree, kind: Kind) {
        let mut add = |last: &Ident, called: &Ident| {
            let word = |ident: &Ident| if ident == "self" { before.last().cloned() } else { Some(ident.to_string()) };
            let parts = if last == "self" { before.to_vec() } else { joined(before, &last.to_string()) };
            self.add(parts, word(called).unwrap_or_default(), kind, last.span());
        };
        match tree {
            UseTree::Path(path) => self.add_use(&joined(before, &path.ident.to_string()), &path.tree, kind),
            UseTree::Group(group) => group.items.iter().for_each(|tree| self.add_use(before, tree, kind)),
            UseTree::Name(name) => add(&name.ident, &name.ident),
            UseTree::Rename(renamed) => add(&renamed.ident, &renamed.rename),
            UseTree::Glob(glob) => self.add(before.to_vec(), "*".to_owned(), kind, glob.star_token.spans[0]),
        }
    }

    /// Adds the paths in the arguments of a macro or an attribute. `before` is the path before a group, as in `a::{b, c::d}`.
    fn add_tokens(&mut self, before: &[Ident], tokens: &TokenStream) {
        let (mut path, mut colons) = (before.to_vec(), 0);
        for token in tokens.clone() {
            if matches!(&token, TokenTree::Punct(punct) if punct.as_char() == ':') {
                colons += 1;
                continue;
            }
            let continues = std::mem::take(&mut colons) == 2;
            if let TokenTree::Group(group) = &token {
                self.add_tokens(if continues { &path } else { &[] }, &group.stream());
            }
            if !(continues && matches!(token, TokenTree::Ident(_))) {
                self.add_path(&std::mem::replace(&mut path, before.to_vec()));
            }
            if let TokenTree::Ident(word) = token {
                self.words.insert(word.to_string());
                path.push(word);
            }
        }
        self.add_path(&path);
    }
}

impl<'ast> Visit<'ast> for Source {
    fn visit_item(&mut self, item: &'ast Item) {
        match (item, is_for_tests(attributes(item))) {
            (Item::Mod(module), true) => self.test_modules.push(module.ident.to_string()),
            (_, true) => {}
            (_, false) => visit::visit_item(self, item),
        }
    }

    fn visit_impl_item_fn(&mut self, function: &'ast ImplItemFn) {
        if !is_for_tests(&function.attrs) {
            visit::visit_impl_item_fn(self, function);
        }
    }

    fn visit_item_mod(&mut self, module: &'ast ItemMod) {
        let inline = usize::from(module.content.is_some());
        self.depth += inline;
        visit::visit_item_mod(self, module);
        self.depth -= inline;
    }

    fn visit_item_use(&mut self, item: &'ast ItemUse) {
        let is_private = matches!(item.vis, Visibility::Inherited);
        self.add_use(&[], &item.tree, if is_private { Kind::Import } else { Kind::Reexport });
    }

    fn visit_item_struct(&mut self, item: &'ast ItemStruct) {
        for (number, field) in item.fields.iter().enumerate() {
            if let Visibility::Restricted(restricted) = &field.vis
                && restricted.path.is_ident("crate")
            {
                let name = field.ident.as_ref().map_or_else(|| number.to_string(), Ident::to_string);
                let line = restricted.pub_token.span.start().line;
                self.crate_fields.push(Field { of: format!("{} {}", self.file, item.ident), line, name });
            }
        }
        visit::visit_item_struct(self, item);
    }

    /// The module in `pub(in module)` is a parent, and not an import.
    fn visit_visibility(&mut self, _: &'ast Visibility) {}

    fn visit_path(&mut self, path: &'ast Path) {
        self.add_path(&path.segments.iter().map(|segment| segment.ident.clone()).collect::<Vec<_>>());
        visit::visit_path(self, path);
    }

    fn visit_ident(&mut self, word: &'ast Ident) {
        self.words.insert(word.to_string());
    }

    fn visit_macro(&mut self, call: &'ast Macro) {
        self.add_tokens(&[], &call.tokens);
        visit::visit_macro(self, call);
    }

    fn visit_meta_list(&mut self, list: &'ast MetaList) {
        self.add_tokens(&[], &list.tokens);
        visit::visit_meta_list(self, list);
    }
}

/// Returns the attributes of the kinds of items that tests add to a file.
fn attributes(item: &Item) -> &[Attribute] {
    match item {
        Item::Fn(ItemFn { attrs, .. })
        | Item::Impl(ItemImpl { attrs, .. })
        | Item::Macro(ItemMacro { attrs, .. })
        | Item::Mod(ItemMod { attrs, .. })
        | Item::Struct(ItemStruct { attrs, .. })
        | Item::Use(ItemUse { attrs, .. }) => attrs,
        _ => &[],
    }
}

/// Returns `true` if an item with these attributes exists only in tests.
fn is_for_tests(attributes: &[Attribute]) -> bool {
    fn requires_test(condition: &Meta) -> bool {
        match condition {
            Meta::List(list) if list.path.is_ident("cfg") || list.path.is_ident("all") => list
                .parse_args_with(Punctuated::<Meta, Token![,]>::parse_terminated)
                .is_ok_and(|conditions| conditions.iter().any(requires_test)),
            condition => condition.path().is_ident("test") || condition.path().is_ident("doctest"),
        }
    }
    attributes.iter().any(|attribute| attribute.path().is_ident("cfg") && requires_test(&attribute.meta))
}
