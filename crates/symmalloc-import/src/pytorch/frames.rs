//! Python stack frames: selects the frame that names an allocation.
//!
//! A stack has some fifty frames, innermost first: those of PyTorch, in C++ and Python, and those of the program. The innermost frame of
//! the program names the allocation: `model/attention.py:88 forward`. If there is none, as in an optimizer's step that a hook runs, the
//! innermost Python frame of PyTorch at least indicates the purpose. C++ frames are never used.
//!
//! Only these two frames of each stack are kept: all frames of all entries would take more memory than the rest of a snapshot.

use super::words::{self, FILENAME, LINE, NAME};
use crate::pickle::{DictId, Document, Item, Kept, Value, Values, Word};
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
    let frames = values.list(stack).items.iter().filter_map(|item| match item {
        Item::Dict(frame) => Some((*frame, code_of(values, *frame)?)),
        Item::List(_) => None,
    });
    let (frame, _) = frames.min_by_key(|(_, code)| *code as u8)?;
    let path = text_of(values, frame, FILENAME)?;
    let start = path.rmatch_indices('/').nth(1).map_or(0, |(slash, _)| slash + 1);
    let mut name = path[start..].to_owned();
    if let Some(Value::Integer(line)) = values.field(frame, LINE) {
        name += &format!(":{line}");
    }
    if let Some(function) = text_of(values, frame, NAME) {
        name += &format!(" {function}");
    }
    let name: String = name.chars().filter(|character| !character.is_control()).collect();
    (name.len() <= NAME_BYTES_MAX).then_some(name)
}

#[cfg(test)]
mod tests {
    use super::*;

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
