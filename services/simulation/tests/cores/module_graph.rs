//! The modules of the workspace and what their paths name, read from the sources. Code under
//! `cfg(test)` is left out.

use std::{
    cell::OnceCell,
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

use proc_macro2::{TokenStream, TokenTree};
use syn::{
    Attribute, ImplItemFn, Item, Macro, UseTree,
    visit::{self, Visit},
};

/// A crate and the modules below its root, or a path of another crate.
pub(crate) type Segments = Vec<String>;

/// The library crates of the workspace by name. A crate is read when a path first names it.
#[derive(Default)]
pub(crate) struct ModuleGraph {
    crates: BTreeMap<String, Crate>,
}

struct Crate {
    folder: PathBuf,
    modules: OnceCell<Modules>,
}

type Modules = BTreeMap<Segments, Module>;

/// Meaning of a path.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Target {
    /// An item of this module of the workspace.
    Item(Segments),
    /// A module of the workspace. Other paths name the items in it.
    Namespace(Segments),
    /// An item of another crate.
    External(Segments),
}

#[derive(Default)]
struct Module {
    children: BTreeSet<String>,
    items: BTreeSet<String>,
    /// The path that each imported name stands for.
    imports: BTreeMap<String, Segments>,
    globs: Vec<Segments>,
    /// Paths of at least two segments, outside imports.
    paths: Vec<Segments>,
}

impl ModuleGraph {
    /// Adds the library crate in this folder, if it is one.
    pub(crate) fn add_crate(&mut self, folder: &Path) {
        let name = folder.file_name().expect("a folder has a name").to_string_lossy();
        if folder.join("src/lib.rs").exists() {
            let folder = folder.join("src");
            let read = Crate { folder, modules: OnceCell::new() };
            self.crates.insert(name.replace('-', "_"), read);
        }
    }

    /// Returns the module with this path and all modules below.
    pub(crate) fn below(&self, module: &[String]) -> impl Iterator<Item = &Segments> {
        self.modules(&module[0]).keys().filter(move |path| path.starts_with(module))
    }

    /// Returns the items that the module uses.
    pub(crate) fn uses(&self, module: &Segments) -> BTreeSet<Target> {
        let Module { imports, globs, paths, .. } = self.module(module);
        let resolve = |path: &Segments| self.resolve(module, path, &mut BTreeSet::new());
        let globs = globs.iter().filter_map(resolve).map(|target| match target {
            Target::Namespace(path) => Target::Item(path),
            target => target,
        });
        let named = imports.values().chain(paths).filter_map(resolve);
        named.filter(|target| !matches!(target, Target::Namespace(_))).chain(globs).collect()
    }

    fn modules(&self, name: &str) -> &Modules {
        let Crate { folder, modules } = &self.crates[name];
        modules.get_or_init(|| {
            let mut modules = Modules::new();
            add_file(&mut modules, vec![name.to_owned()], &folder.join("lib.rs"), folder);
            modules
        })
    }

    fn module(&self, path: &[String]) -> &Module {
        &self.modules(&path[0])[path]
    }

    /// Resolves a path in the code of `module`. `seen` ends circles of imports.
    fn resolve(
        &self,
        module: &[String],
        path: &[String],
        seen: &mut BTreeSet<(Segments, Segments)>,
    ) -> Option<Target> {
        let (first, rest) = path.split_first()?;
        if !seen.insert((module.to_vec(), path.to_vec())) {
            return None;
        }
        match first.as_str() {
            "crate" => return self.descend(&module[..1], rest, seen),
            "self" => return self.descend(module, rest, seen),
            "super" => return self.descend(&module[..module.len() - 1], rest, seen),
            _ => {}
        }
        let here = self.module(module);
        if here.children.contains(first) || here.imports.contains_key(first) {
            return self.descend(module, path, seen);
        }
        if self.crates.contains_key(first) {
            return self.descend(std::slice::from_ref(first), rest, seen);
        }
        // A local item, or an item of a glob import, whose module is a dependency already.
        let is_local = here.items.contains(first) || first.starts_with(char::is_uppercase);
        (!is_local).then(|| Target::External(path.to_vec()))
    }

    /// Resolves the rest of a path of which `module` is the first part.
    fn descend(
        &self,
        module: &[String],
        path: &[String],
        seen: &mut BTreeSet<(Segments, Segments)>,
    ) -> Option<Target> {
        let Some((first, rest)) = path.split_first() else {
            return Some(Target::Namespace(module.to_vec()));
        };
        if first == "super" {
            return self.descend(&module[..module.len() - 1], rest, seen);
        }
        let here = self.module(module);
        if here.children.contains(first) {
            return self.descend(&joined(module, first), rest, seen);
        }
        if let Some(import) = here.imports.get(first) {
            let is_itself = import.len() == 1 && import[0] == *first;
            return match is_itself {
                true => self.resolve_crate(first, rest, seen),
                false => self.resolve(module, &[&import[..], rest].concat(), seen),
            };
        }
        let is_item = here.items.contains(first);
        let glob = here.globs.iter().filter(|_| !is_item).find_map(|glob| {
            let Some(Target::Namespace(from)) = self.resolve(module, glob, seen) else {
                return None;
            };
            self.module(&from).has(first).then_some(from)
        });
        match glob {
            Some(from) => self.descend(&from, path, seen),
            None => Some(Target::Item(module.to_vec())),
        }
    }

    /// Resolves a path after `use name;`, which imports a crate.
    fn resolve_crate(
        &self,
        name: &String,
        rest: &[String],
        seen: &mut BTreeSet<(Segments, Segments)>,
    ) -> Option<Target> {
        match self.crates.contains_key(name) {
            true => self.descend(std::slice::from_ref(name), rest, seen),
            false => Some(Target::External([std::slice::from_ref(name), rest].concat())),
        }
    }
}

fn add_file(modules: &mut Modules, path: Segments, file: &Path, children: &Path) {
    let text = fs::read_to_string(file).unwrap_or_else(|error| panic!("{file:?}: {error}"));
    let parsed = syn::parse_file(&text).unwrap_or_else(|error| panic!("{file:?}: {error}"));
    add_module(modules, path, &parsed.items, children);
}

fn add_module(modules: &mut Modules, path: Segments, items: &[Item], folder: &Path) {
    let mut module = Module::default();
    for item in items {
        module.items.extend(name(item));
        let Item::Mod(child) = item else { continue };
        if is_test(&child.attrs) {
            continue;
        }
        let name = child.ident.to_string();
        let (child_path, below) = (joined(&path, &name), folder.join(&name));
        module.children.insert(name);
        match &child.content {
            Some((_, items)) => add_module(modules, child_path, items, &below),
            None => {
                add_file(modules, child_path, &below.with_extension("rs"), &below);
            }
        }
    }
    items.iter().for_each(|item| module.visit_item(item));
    modules.insert(path, module);
}

impl Module {
    fn has(&self, name: &String) -> bool {
        self.items.contains(name) || self.children.contains(name) || self.imports.contains_key(name)
    }

    fn add_import(&mut self, prefix: &[String], tree: &UseTree) {
        match tree {
            UseTree::Path(path) => {
                self.add_import(&joined(prefix, &path.ident.to_string()), &path.tree);
            }
            UseTree::Name(name) => self.add_name(prefix, name.ident.to_string(), None),
            UseTree::Rename(rename) => {
                let alias = Some(rename.rename.to_string());
                self.add_name(prefix, rename.ident.to_string(), alias);
            }
            UseTree::Glob(_) => self.globs.push(prefix.to_vec()),
            UseTree::Group(group) => {
                group.items.iter().for_each(|tree| self.add_import(prefix, tree));
            }
        }
    }

    fn add_name(&mut self, prefix: &[String], name: String, alias: Option<String>) {
        let path = match name == "self" {
            true => prefix.to_vec(),
            false => joined(prefix, &name),
        };
        let Some(last) = path.last() else { return };
        self.imports.insert(alias.unwrap_or_else(|| last.clone()), path);
    }

    fn add_path(&mut self, path: Segments) {
        if path.len() > 1 {
            self.paths.push(path);
        }
    }

    /// Adds the paths in the input of a macro.
    fn add_tokens(&mut self, tokens: TokenStream) {
        let (mut path, mut colons) = (Segments::new(), 0);
        for token in tokens {
            match token {
                TokenTree::Punct(punct) if punct.as_char() == ':' => colons += 1,
                TokenTree::Ident(ident) => {
                    if colons != 2 {
                        self.add_path(std::mem::take(&mut path));
                    }
                    path.push(ident.to_string());
                    colons = 0;
                }
                other => {
                    self.add_path(std::mem::take(&mut path));
                    colons = 0;
                    if let TokenTree::Group(group) = other {
                        self.add_tokens(group.stream());
                    }
                }
            }
        }
        self.add_path(path);
    }
}

impl<'a> Visit<'a> for Module {
    fn visit_item(&mut self, item: &'a Item) {
        match item {
            // A module of its own.
            Item::Mod(_) => {}
            Item::Use(item) => self.add_import(&[], &item.tree),
            item if is_test(attributes(item)) => {}
            item => visit::visit_item(self, item),
        }
    }

    fn visit_impl_item_fn(&mut self, function: &'a ImplItemFn) {
        if !is_test(&function.attrs) {
            visit::visit_impl_item_fn(self, function);
        }
    }

    fn visit_path(&mut self, path: &'a syn::Path) {
        self.add_path(path.segments.iter().map(|segment| segment.ident.to_string()).collect());
        visit::visit_path(self, path);
    }

    fn visit_macro(&mut self, call: &'a Macro) {
        self.visit_path(&call.path);
        self.add_tokens(call.tokens.clone());
    }

    fn visit_attribute(&mut self, _attribute: &'a Attribute) {}
}

fn joined(path: &[String], name: &str) -> Segments {
    [path, &[name.to_owned()]].concat()
}

fn is_test(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        let is_cfg_test =
            |list: &syn::MetaList| list.path.is_ident("cfg") && list.tokens.to_string() == "test";
        attribute.path().is_ident("test") || attribute.meta.require_list().is_ok_and(is_cfg_test)
    })
}

fn name(item: &Item) -> Option<String> {
    let name = match item {
        Item::Const(item) => &item.ident,
        Item::Enum(item) => &item.ident,
        Item::Fn(item) => &item.sig.ident,
        Item::Macro(item) => item.ident.as_ref()?,
        Item::Static(item) => &item.ident,
        Item::Struct(item) => &item.ident,
        Item::Trait(item) => &item.ident,
        Item::Type(item) => &item.ident,
        _ => return None,
    };
    Some(name.to_string())
}

fn attributes(item: &Item) -> &[Attribute] {
    match item {
        Item::Const(item) => &item.attrs,
        Item::Enum(item) => &item.attrs,
        Item::Fn(item) => &item.attrs,
        Item::Impl(item) => &item.attrs,
        Item::Static(item) => &item.attrs,
        Item::Struct(item) => &item.attrs,
        Item::Trait(item) => &item.attrs,
        Item::Type(item) => &item.attrs,
        _ => &[],
    }
}
