//! Python stack frames: selects the frame that names an allocation, and reads whole stacks if the caller wants them.
//!
//! A stack has some fifty frames, innermost first. Some are PyTorch's, in C++ and Python, and some are the program's. The innermost frame
//! of the program names the allocation: `model/attention.py:88 forward`. Installed packages are part of the program, except for PyTorch and
//! the [libraries](crate::ReadOptions::libraries) that the caller names. A stack without any frame of the program, such as that of an
//! optimizer's step that a hook runs, names the allocation after the innermost Python frame of a library (usually PyTorch), which at least
//! indicates the purpose. C++ frames never name an allocation.
//!
//! By default, only two frames of each stack are kept (the innermost frame of the program and the innermost frame of a library), because
//! all frames of all entries would take more memory than the rest of a snapshot. With [`ReadOptions::stacks`](crate::ReadOptions::stacks),
//! the 256 innermost Python frames of each stack are kept, both those of the program and those of libraries. C++ frames are omitted,
//! because they repeat the dispatch from Python to the allocator. Frames without a file, such as `??` and `<frozen runpy>`, are omitted as
//! well. The path of a file in an installed package starts at the package (`torch/nn/modules/linear.py`). Every other path is kept whole.

use std::borrow::Cow;
use std::collections::HashMap;

use super::words::{self, FILENAME, LINE, NAME};
use crate::options::{ALL_LIBRARIES, ReadOptions};
use crate::pickle::{DictId, Document, Item, Kept, LEADING_MAX, ListId, Value, Values, Word};
use crate::stacks::{Stacks, StacksBuilder, TooLarge};
use symmalloc_trace::NAME_BYTES_MAX;

/// The origin of a frame's code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Code {
    Program,
    /// PyTorch, another library, or Python's standard library.
    Library,
    /// Not Python code.
    Native,
}

/// Distinguishes the frames of the program from the frames of libraries.
pub(super) struct Program<'a> {
    /// Installed packages that count as libraries. PyTorch always counts as one.
    libraries: &'a [String],
}

impl<'a> Program<'a> {
    pub(super) fn new(options: &'a ReadOptions) -> Self {
        Program { libraries: &options.libraries }
    }

    fn code_of(&self, path: &str) -> Code {
        let path = with_slashes(path);
        let is_native = !path.ends_with(".py") && !path.starts_with("<ipython") && !path.starts_with("/tmp/ipykernel");
        match (is_native, installed(&path)) {
            (true, _) => Code::Native,
            (_, Some(inside)) => {
                let package = inside.split('/').next().unwrap_or(inside).trim_end_matches(".py");
                let is_named = |library: &String| library == ALL_LIBRARIES || library == package;
                if package == "torch" || self.libraries.iter().any(is_named) { Code::Library } else { Code::Program }
            }
            (_, None) if is_of_pytorch(&path) || is_of_python(&path) => Code::Library,
            _ => Code::Program,
        }
    }

    /// Decides whether lists keep a dict. Lists keep all dicts that are not frames, and the two frames of a stack that may name an
    /// allocation.
    pub(super) fn keeps(&self, values: &Values, dict: DictId) -> Kept {
        match text_of(values, dict, FILENAME).map(|path| self.code_of(path)) {
            None => Kept::Always,
            Some(Code::Program) => Kept::First(0),
            Some(Code::Library) => Kept::First(1),
            Some(Code::Native) => Kept::Never,
        }
    }

    /// Keeps the leading Python frames of each list. For all other dicts, decides like [`keeps`](Program::keeps).
    pub(super) fn keeps_stacks(&self, values: &Values, dict: DictId) -> Kept {
        match self.keeps(values, dict) {
            Kept::First(kind) => Kept::Leading(kind),
            kept => kept,
        }
    }
}

/// Returns a path with the separators of Unix.
fn with_slashes(path: &str) -> Cow<'_, str> {
    if path.contains('\\') { path.replace('\\', "/").into() } else { path.into() }
}

/// Returns the part of a path after the folder in which packages are installed.
fn installed(path: &str) -> Option<&str> {
    let end = |folder: &str| path.rfind(folder).map(|start| start + folder.len());
    let start = end("site-packages/").max(end("dist-packages/"))?;
    Some(&path[start..])
}

/// Parts of PyTorch in which the files of frames lie. A project's folder may also be named `torch`, so the folder alone proves nothing.
const PARTS_OF_PYTORCH: &[&str] = &[
    "_",
    "amp/",
    "ao/",
    "autograd/",
    "compiler/",
    "cuda/",
    "distributed/",
    "export/",
    "functional.py",
    "func/",
    "fx/",
    "jit/",
    "nn/functional.py",
    "nn/init.py",
    "nn/attention/",
    "nn/modules/",
    "nn/parallel/",
    "nn/parameter.py",
    "nn/utils/",
    "optim/adam",
    "optim/lr_scheduler.py",
    "optim/optimizer.py",
    "optim/sgd.py",
    "optim/_",
    "random.py",
    "serialization.py",
    "storage.py",
    "utils/_",
    "utils/checkpoint.py",
    "utils/data/",
];

/// Returns `true` for a file of PyTorch, if PyTorch runs from its source folder.
fn is_of_pytorch(path: &str) -> bool {
    let start = if path.starts_with("torch/") { Some(0) } else { path.rfind("/torch/").map(|slash| slash + 1) };
    let inside = start.map(|start| &path[start + "torch/".len()..]);
    inside.is_some_and(|inside| PARTS_OF_PYTORCH.iter().any(|part| inside.starts_with(part)))
}

/// Returns `true` for a file of Python's standard library.
fn is_of_python(path: &str) -> bool {
    let is_on_windows = path.as_bytes().get(1) == Some(&b':');
    let installation = path.find("/Lib/").filter(|_| is_on_windows).map(|end| path[..end].to_ascii_lowercase());
    path.contains("/lib/python3") || installation.is_some_and(|path| path.contains("python") || path.contains("conda"))
}

fn text_of(values: &Values, dict: DictId, word: Word) -> Option<&str> {
    match values.field(dict, word)? {
        Value::Text(text) => Some(values.text(text)),
        Value::Word(word) => Some(words::text(word)),
        _ => None,
    }
}

/// Returns the name that a stack gives to its allocation.
pub(super) fn name(document: &Document, stack: Option<Value>) -> Option<String> {
    let Some(Value::List(stack)) = stack else { return None };
    let values = &document.values;
    let (frame, _) = python_frames(values, stack).min_by_key(|(_, kind)| *kind)?;
    let path = with_slashes(text_of(values, frame, FILENAME)?);
    let start = path.rmatch_indices('/').nth(1).map_or(0, |(slash, _)| slash + 1);
    text(values, frame, &path[start..])
}

/// Returns the kept Python frames of a stack, innermost first. Each has a kind: 0 for the program, 1 for a library.
fn python_frames(values: &Values, stack: ListId) -> impl Iterator<Item = (DictId, u8)> {
    values.list(stack).items.iter().filter_map(|item| match *item {
        Item::Dict(frame) => match values.kept(frame) {
            Some(Kept::First(kind) | Kept::Leading(kind)) => Some((frame, kind)),
            _ => None,
        },
        Item::List(_) => None,
    })
}

/// Returns the text of a frame, given its path: `model/attention.py:88 forward`.
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

/// Returns a path without the folder in which packages are installed.
fn without_site(path: &str) -> Cow<'_, str> {
    let slashed = with_slashes(path);
    match installed(&slashed) {
        Some(inside) => inside.to_owned().into(),
        None => path.into(),
    }
}

/// Reads the stacks of allocations. Each list and each frame is read once, regardless of how many allocations share it.
pub(super) struct StackReader<'a> {
    document: &'a Document,
    stacks: StacksBuilder,
    /// Number of each frame; `None` if the frame has no text. Never iterated.
    frames: HashMap<DictId, Option<u32>>,
    /// Number of each stack; `None` if the stack has no frames. Never iterated.
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

    /// Returns the index of a stack whose request was refused, so that it has no allocation.
    pub(super) fn stack_of(&mut self, stack: Option<Value>) -> Result<Option<usize>, TooLarge> {
        let Some(Value::List(list)) = stack else { return Ok(None) };
        Ok(self.stack(list)?.map(|number| number as usize))
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
        let text = path.and_then(|path| text(values, frame, &path));
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
            (r"C:\env\Lib\site-packages\torch\nn\modules\linear.py", "torch/nn/modules/linear.py"),
            (r"C:\work\model.py", r"C:\work\model.py"),
        ] {
            assert_eq!(without_site(path), shown);
        }
    }

    #[test]
    fn files_outside_of_pytorch_python_and_named_libraries_belong_to_the_program() {
        let (program, library) = (Code::Program, Code::Library);
        for (path, code, code_with_transformers, code_with_all) in [
            ("/home/me/job/model.py", program, program, program),
            ("train.py", program, program, program),
            (r"C:\work\proj\model.py", program, program, program),
            ("/home/me/code/torch/project/model.py", program, program, program),
            ("/home/me/torch/train.py", program, program, program),
            (r"D:\torch\project\Lib\model.py", program, program, program),
            ("<ipython-input-3-abc>", program, program, program),
            (r"C:\Users\me\AppData\Local\Temp\ipykernel_12\34.py", program, program, program),
            ("/usr/lib/python3/dist-packages/transformers/modeling.py", program, library, library),
            (r"C:\env\Lib\site-packages\transformers\modeling.py", program, library, library),
            ("/opt/venv/lib/python3.12/site-packages/diffusers/unet.py", program, program, library),
            ("/opt/venv/lib/python3.12/site-packages/transformers_of_mine/unet.py", program, program, library),
            ("/opt/venv/lib/python3.12/site-packages/einops/einops.py", library, library, library),
            ("/opt/venv/lib/python3.12/site-packages/torch/nn/modules/linear.py", library, library, library),
            ("/opt/venv/lib/python3.12/site-packages/torch/new_folder/new.py", library, library, library),
            (r"C:\Users\me\miniconda3\Lib\site-packages\torch\nn\modules\linear.py", library, library, library),
            (r"C:\Users\me\miniconda3\Lib\contextlib.py", library, library, library),
            (r"C:\Program Files\Python312\Lib\contextlib.py", library, library, library),
            ("/usr/lib/python3.12/contextlib.py", library, library, library),
            ("/home/me/pytorch/torch/nn/modules/linear.py", library, library, library),
            ("/home/me/pytorch/torch/_tensor.py", library, library, library),
            ("torch/autograd/graph.py", library, library, library),
            ("/pytorch/c10/cuda/CUDACachingAllocator.cpp", Code::Native, Code::Native, Code::Native),
            ("??", Code::Native, Code::Native, Code::Native),
        ] {
            let default = ReadOptions::default();
            let named = |library: &str| ReadOptions::default().library(library);
            assert_eq!(Program::new(&default).code_of(path), code, "{path}");
            assert_eq!(Program::new(&named("transformers")).code_of(path), code_with_transformers, "{path}");
            assert_eq!(Program::new(&named("all")).code_of(path), code_with_all, "{path}");
        }
    }
}
