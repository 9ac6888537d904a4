//! Tests of the Python stacks of a snapshot.

use super::*;
use crate::stacks::Stacks;
use symmalloc_core::ids::AllocationId;
use symmalloc_trace::NAME_BYTES_MAX;

type Frame<'a> = (&'a str, i64, &'a str);

/// Returns a snapshot with these stacks, and an allocation for each index of one.
fn with_stacks(stacks: &[&[Frame<'_>]], allocations: &[Option<usize>]) -> Vec<u8> {
    // The memo holds the frames, which the stacks of a snapshot share, and after them the stacks.
    let mut distinct: Vec<Frame<'_>> = stacks.concat();
    distinct.sort_unstable();
    distinct.dedup();
    let mut pickle = Pickle::of_protocol(2);
    for ((file, line, function), index) in distinct.iter().zip(0..) {
        pickle = pickle.dict().mark().text("name").text(function).text("filename").text(file);
        pickle = pickle.text("line").integer(*line).op(SETITEMS).put(index).op(POP);
    }
    for (stack, index) in stacks.iter().zip(distinct.len() as u32..) {
        pickle = pickle.list().mark();
        for frame in *stack {
            pickle = pickle.fetch(distinct.binary_search(frame).unwrap() as u32);
        }
        pickle = pickle.op(APPENDS).put(index).op(POP);
    }
    pickle = pickle.dict().text("device_traces").list().list().mark();
    for (stack, address) in allocations.iter().zip(1..) {
        pickle = pickle.dict().mark().text("action").text("alloc").text("addr").integer(address);
        pickle = pickle.text("size").integer(512).text("stream").integer(0);
        if let Some(stack) = stack {
            pickle = pickle.text("frames").fetch((distinct.len() + stack) as u32);
        }
        pickle = pickle.op(SETITEMS);
    }
    pickle.op(APPENDS).op(b'a').op(b's').stop()
}

const POP: u8 = b'0';

fn read_stacks(pickle: &[u8]) -> Option<Stacks> {
    let mut transcript = read(pickle, &ReadOptions::default().stacks()).unwrap_or_else(|error| panic!("{error}"));
    let stacks = transcript.stacks.take();
    let mut plain = read(pickle, &ReadOptions::default()).unwrap();
    assert_eq!(plain.stacks.take(), None, "nobody asked for stacks");
    assert_eq!(transcript.finish(), plain.finish(), "stacks change the records");
    stacks
}

/// Returns the frames of an allocation's stack, and the number of omitted ones.
fn frames_of(stacks: &Stacks, id: u64) -> (Vec<&str>, u64) {
    let Some(stack) = stacks.of(AllocationId(id)) else { return (Vec::new(), 0) };
    let stack = &stacks.stacks()[stack];
    (stack.frames.iter().map(|&frame| &*stacks.frames()[frame as usize]).collect(), stack.frames_omitted)
}

#[test]
fn a_stack_has_the_python_frames_of_the_program_and_of_libraries() {
    let stack: &[Frame<'_>] = &[
        ("/pytorch/c10/cuda/CUDACachingAllocator.cpp", 1, "malloc"),
        ("??", 0, "unwind"),
        ("/venv/lib/python3.12/site-packages/torch/nn/modules/linear.py", 134, "forward"),
        ("/home/me/job/model.py", 17, "for\u{1b}ward"),
        ("/venv/lib/python3.12/site-packages/torch/nn/modules/module.py", 1762, "_call_impl"),
        ("/home/me/job/train.py", 6, "<module>"),
        ("<frozen runpy>", 88, "_run_code"),
    ];
    let stacks = read_stacks(&with_stacks(&[stack], &[Some(0)])).unwrap();
    let expected = [
        "torch/nn/modules/linear.py:134 forward",
        "/home/me/job/model.py:17 forward",
        "torch/nn/modules/module.py:1762 _call_impl",
        "/home/me/job/train.py:6 <module>",
    ];
    assert_eq!(frames_of(&stacks, 0), (expected.to_vec(), 0));
}

#[test]
fn allocations_of_one_place_share_a_stack() {
    let (one, other): (&[Frame<'_>], &[Frame<'_>]) = (&[("a.py", 1, "f"), ("main.py", 9, "g")], &[("main.py", 9, "g")]);
    // PyTorch writes a list for each allocation.
    let pickle = with_stacks(&[one, other, one, one], &[Some(2), Some(1), None, Some(0), Some(3), Some(2)]);
    let stacks = read_stacks(&pickle).unwrap();
    assert_eq!((stacks.frames().len(), stacks.stacks().len()), (2, 2));
    let of: Vec<Option<usize>> = (0..6).map(|id| stacks.of(AllocationId(id))).collect();
    assert_eq!(of, [Some(0), Some(1), None, Some(0), Some(0), Some(0)]);
    assert_eq!(frames_of(&stacks, 5).0, ["a.py:1 f", "main.py:9 g"]);
}

#[test]
fn blocks_that_lived_before_the_trace_have_stacks() {
    let stack: &[_] = &[("/venv/site-packages/torch/optim/adam.py", 40, "step"), ("job/train.py", 7, "main")];
    let pickle = with_segment(&[(0x2000, 200, "active_allocated", stack)], 1);
    let stacks = read_stacks(&pickle).unwrap();
    // The trace frees another allocation without a stack first, and allocates one.
    let lengths = [0, 1, 2].map(|id| frames_of(&stacks, id).0.len());
    assert_eq!(lengths, [0, 2, 0]);
    assert_eq!(frames_of(&stacks, 1).0, ["torch/optim/adam.py:40 step", "job/train.py:7 main"]);
}

#[test]
fn a_snapshot_without_python_frames_has_no_stacks() {
    let native: &[Frame<'_>] = &[("??", 0, "unwind"), ("/pytorch/aten/src/ATen/Context.cpp", 3, "f")];
    assert_eq!(read_stacks(&with_stacks(&[], &[None, None])), None);
    assert_eq!(read_stacks(&with_stacks(&[&[], native], &[Some(0), Some(1)])), None);
}

#[test]
fn a_stack_keeps_its_256_innermost_frames_and_counts_the_rest() {
    let recursion: Vec<Frame<'_>> = (0..300).map(|line| ("/lib/python3.12/copy.py", line, "deepcopy")).collect();
    let program = ("train.py", 1, "main");
    let deep = [&recursion[..], &[program, program]].concat();
    let long_name = "x".repeat(NAME_BYTES_MAX - 5);
    let long: &[Frame<'_>] = &[("train.py", 12, &long_name), program];
    let stacks = read_stacks(&with_stacks(&[&deep, long], &[Some(0), Some(1)])).unwrap();
    let (frames, omitted) = frames_of(&stacks, 0);
    // The name is that of the program, although it lies beyond the kept frames.
    assert_eq!((frames.len(), omitted), (256, 46));
    assert_eq!(
        (frames[0], frames[255]),
        ("/lib/python3.12/copy.py:0 deepcopy", "/lib/python3.12/copy.py:255 deepcopy")
    );
    assert_eq!(frames_of(&stacks, 1), (vec!["train.py:1 main"], 1));
}

#[test]
fn stacks_stay_within_the_memory_limit() {
    // One long name that many frames share: a short pickle with long texts.
    let name = "x".repeat(4_000);
    let mut pickle = Pickle::of_protocol(2).dict().text("name").text(&name).put(0).op(b's').op(POP);
    pickle = pickle.dict().text("device_traces").list().list().mark();
    for line in 0..1_000 {
        pickle = pickle.dict().mark().text("action").text("alloc").text("addr").integer(line + 1);
        pickle = pickle.text("size").integer(512).text("stream").integer(0).text("frames").list();
        pickle = pickle.dict().mark().text("name").fetch(0).text("filename").text("a.py").text("line").integer(line);
        pickle = pickle.op(SETITEMS).op(b'a').text("user_metadata").text("n").op(SETITEMS);
    }
    let pickle = pickle.op(APPENDS).op(b'a').op(b's').stop();
    let options = ReadOptions::default().memory_limit_bytes(1 << 20);
    assert!(read(&pickle[..], &options).is_ok());
    let error = read(&pickle[..], &options.stacks()).err().expect("the frames take 8 MB");
    assert!(matches!(error, SnapshotError::StacksTooLarge { device: 0, limit_bytes: 0x10_0000, .. }), "{error}");
    assert_eq!(read_stacks(&pickle).unwrap().frames().len(), 1_000);
}

/// Reading the list for each entry would take minutes.
#[test]
fn a_long_list_that_many_entries_share_is_one_stack() {
    let frames: Vec<Frame<'_>> = (0..100_000).map(|line| ("train.py", line % 1_000, "f")).collect();
    let allocations = vec![Some(0); 100_000];
    let stacks = read_stacks(&with_stacks(&[&frames], &allocations)).unwrap();
    assert_eq!((stacks.stacks().len(), stacks.stacks()[0].frames_omitted), (1, 100_000 - 256));
}
