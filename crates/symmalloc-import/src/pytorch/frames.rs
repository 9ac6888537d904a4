//! Python stack frames: selects the frame that names an allocation, and reads whole stacks for callers that want them.
//!
//! A stack has some fifty frames, innermost first: those of PyTorch, in C++ and Python, and those of the program. The innermost frame of
//! the program names the allocation: `model/attention.py:88 forward`. If there is none, as in an optimizer's step that a hook runs, the
//! innermost Python frame of PyTorch at least indicates the purpose. C++ frames are never used.
//!
//! By default, only these two frames of each stack are kept: all frames of all entries would take more memory than the rest of a snapshot.
//! With [`ReadOptions::stacks`](crate::ReadOptions::stacks), the 256 innermost Python frames of each stack are kept, those of the program
//! and of libraries. C++ frames are left out, because they repeat the dispatch from Python to the allocator, and so are frames without a
//! file, such as `??` and `<frozen runpy>`. A path starts at its package (`torch/nn/modules/linear.py`) if it is that of an installed
//! package, and is whole otherwise.

use std::collections::HashMap;

use super::words::{self, FILENAME, LINE, NAME};
use crate::pickle::{DictId, Document, Item, Kept, LEADING_MAX, ListId, Value, Values, Word};
use crate::stacks::{Stacks, StacksBuilder, TooLarge};
use symmalloc_trace::NAME_BYTES_MAX;

/// Origin of a frame's code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Code {
    Program,
    /// PyTorch, or Python's standard library.
    Library,
    /// Not Python code.
    Native,
}

impl Code {
    fn of(path: &str) -> Self {
        let is_native = !path.ends_with(".py") && !path.starts_with("<ipython") && !path.starts_with("/tmp/ipykernel");
        let is_installed = path.contains("site-packages/") || path.contains("dist-packages/");
        let is_torch = path.contains("/torch/") || path.starts_with("torch/");
        let is_of_python = !is_installed && path.contains("/lib/python3");
        match (is_native, is_torch || is_of_python) {
            (true, _) => Code::Native,
            (_, true) => Code::Library,
            _ => Code::Program,
        }
    }
}

/// Decides whether lists keep a dict: all dicts except frames, and the two frames of a stack that may name an allocation.
pub(super) fn keeps(values: &Values, dict: DictId) -> Kept {
    match code_of(values, dict) {
        None => Kept::Always,
        Some(Code::Program) => Kept::First(0),
        Some(Code::Library) => Kept::First(1),
        Some(Code::Native) => Kept::Never,
    }
}

/// Keeps the leading Python frames of each list, and otherwise what [`keeps`] keeps.
pub(super) fn keeps_stacks(values: &Values, dict: DictId) -> Kept {
    match keeps(values, dict) {
        Kept::First(kind) => Kept::Leading(kind),
        kept => kept,
    }
}

/// Returns the origin of a frame's code; `None` if the dict is not a frame.
fn code_of(values: &Values, dict: DictId) -> Option<Code> {
    text_of(values, dict, FILENAME).map(Code::of)
}

fn text_of(values: &Values, dict: DictId, word: Word) -> Option<&str> {
    match values.field(dict, word)? {
        Value::Text(text) => Some(values.text(text)),
        Value::Word(word) => Some(words::text(word)),
        _ => None,
    }
}

/// Returns the name that a stack gives to an allocation.
pub(super) fn name(document: &Document, stack: Option<Value>) -> Option<String> {
    let Some(Value::List(stack)) = stack else { return None };
    let values = &document.values;
    let (frame, _) = python_frames(values, stack).min_by_key(|(_, kind)| *kind)?;
    let path = text_of(values, frame, FILENAME)?;
    let start = path.rmatch_indices('/').nth(1).map_or(0, |(slash, _)| slash + 1);
    text(values, frame, &path[start..])
}

/// Returns the kept Python frames of a stack, innermost first, and the kind of each: 0 for the program, 1 for a library.
fn python_frames(values: &Values, stack: ListId) -> impl Iterator<Item = (DictId, u8)> {
    values.list(stack).items.iter().filter_map(|item| match *item {
        Item::Dict(frame) => match values.kept(frame) {
            Some(Kept::First(kind) | Kept::Leading(kind)) => Some((frame, kind)),
            _ => None,
        },
        Item::List(_) => None,
    })
}

/// Returns the text of a frame with this path: `model/attention.py:88 forward`.
fn text(values: &Values, frame: DictId, path: &str) -> Option<String> {
    let mut text = path.to_owned();
    if let Some(Value::Integer(line)) = values.field(frame, LINE) {
        text += &format!(":{line}");
    }
    if let Some(function) = text_of(values, frame, NAME) {
        text += &format!(" {function}");
    }
    let text: String = text.chars().filter(|character| !character.is_control()).collect();
    (text.len() <= NAME_BYTES_MAX).then_some(text)
}

/// Returns the path of a frame without the folder in which packages are installed.
fn without_site(path: &str) -> &str {
    let end = |folder: &str| path.rfind(folder).map(|start| start + folder.len());
    let start = end("site-packages/").max(end("dist-packages/")).unwrap_or(0);
    &path[start..]
}

/// Reads the stacks of allocations. Each list and each frame is read once, however many allocations share it.
pub(super) struct StackReader<'a> {
    document: &'a Document,
    stacks: StacksBuilder,
    /// Number of each frame that has a text. Never iterated.
    frames: HashMap<DictId, Option<u32>>,
    /// Number of each stack that has frames. Never iterated.
    lists: HashMap<ListId, Option<u32>>,
}

impl<'a> StackReader<'a> {
    pub(super) fn new(document: &'a Document, limit_bytes: u64) -> Self {
        let stacks = StacksBuilder::new(limit_bytes);
        StackReader { document, stacks, frames: HashMap::new(), lists: HashMap::new() }
    }

    pub(super) fn limit_bytes(&self) -> u64 {
        self.stacks.limit_bytes()
    }

    /// Adds the stack of the next allocation.
    pub(super) fn allocate(&mut self, stack: Option<Value>) -> Result<(), TooLarge> {
        let stack = match stack {
            Some(Value::List(list)) => self.stack(list)?,
            _ => None,
        };
        self.stacks.allocate(stack)
    }

    pub(super) fn finish(self) -> Option<Stacks> {
        self.stacks.finish()
    }

    fn stack(&mut self, list: ListId) -> Result<Option<u32>, TooLarge> {
        if let Some(number) = self.lists.get(&list) {
            return Ok(*number);
        }
        let values = &self.document.values;
        let (mut frames, mut omitted) = (Vec::new(), values.list(list).omitted.into());
        for (frame, _) in python_frames(values, list) {
            match self.frame(frame)? {
                Some(number) if frames.len() < LEADING_MAX => frames.push(number),
                _ => omitted += 1,
            }
        }
        let number = if frames.is_empty() { None } else { Some(self.stacks.stack(frames, omitted)?) };
        self.lists.insert(list, number);
        Ok(number)
    }

    fn frame(&mut self, frame: DictId) -> Result<Option<u32>, TooLarge> {
        if let Some(number) = self.frames.get(&frame) {
            return Ok(*number);
        }
        let values = &self.document.values;
        let path = text_of(values, frame, FILENAME).map(without_site);
        let text = path.and_then(|path| text(values, frame, path));
        let number = text.map(|text| self.stacks.frame(text)).transpose()?;
        self.frames.insert(frame, number);
        Ok(number)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_path_of_an_installed_package_starts_at_the_package() {
        for (path, shown) in [
            ("/home/me/job/model.py", "/home/me/job/model.py"),
            ("/usr/lib/python3.12/contextlib.py", "/usr/lib/python3.12/contextlib.py"),
            ("/venv/lib/python3.12/site-packages/torch/nn/modules/linear.py", "torch/nn/modules/linear.py"),
            ("/usr/lib/python3/dist-packages/a/site-packages/b.py", "b.py"),
        ] {
            assert_eq!(without_site(path), shown);
        }
    }

    #[test]
    fn files_outside_of_pytorch_and_python_belong_to_the_program() {
        for (path, code) in [
            ("/home/me/job/model.py", Code::Program),
            ("train.py", Code::Program),
            ("/usr/lib/python3/dist-packages/transformers/modeling.py", Code::Program),
            ("/opt/venv/lib/python3.12/site-packages/diffusers/unet.py", Code::Program),
            ("/opt/venv/lib/python3.12/site-packages/torch/nn/modules/linear.py", Code::Library),
            ("/usr/lib/python3.12/contextlib.py", Code::Library),
            ("/pytorch/c10/cuda/CUDACachingAllocator.cpp", Code::Native),
            ("??", Code::Native),
        ] {
            assert_eq!(Code::of(path), code, "{path}");
        }
    }
}
