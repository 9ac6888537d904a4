//! The Python stacks of a recording's allocations.
//!
//! ```text
//! allocations   0: stack 1   1: none   2: stack 0   3: stack 1 ..      by id
//! stacks        0: [2, 0, 1]   1: [3, 1]                               frames, innermost first
//! frames        0: "model.py:17 forward"   1: "train.py:6 <module>" ..
//! ```
//!
//! A job allocates in a few hundred places, but hundreds of thousands of times. Equal frames and equal stacks are
//! therefore stored once.

use std::collections::HashMap;

use symmalloc_core::ids::AllocationId;

/// The Python stack of each allocation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stacks {
    frames: Vec<Box<str>>,
    stacks: Vec<Stack>,
    /// By allocation id: index of the allocation's stack plus 1, or 0 if it has no stack.
    of_allocations: Vec<u32>,
}

/// A Python stack.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Stack {
    /// Indices into [`Stacks::frames`], innermost frame first. There are at most 256.
    pub frames: Box<[u32]>,
    /// Number of omitted frames: those after the first 256, and those whose text is longer than 4 KiB.
    pub frames_omitted: u64,
}

impl Stacks {
    /// Returns the distinct frames as text, such as `/home/me/job/model.py:17 forward`.
    #[must_use]
    pub fn frames(&self) -> &[Box<str>] {
        &self.frames
    }

    /// Returns the distinct stacks, in the order in which an allocation first has them.
    #[must_use]
    pub fn stacks(&self) -> &[Stack] {
        &self.stacks
    }

    /// Returns the index of an allocation's stack in [`stacks`](Stacks::stacks); `None` if the allocation has no stack.
    #[must_use]
    pub fn of(&self, allocation: AllocationId) -> Option<usize> {
        let stack = *self.of_allocations.get(allocation.index())?;
        (stack as usize).checked_sub(1)
    }
}

/// Error: the stacks exceed the memory limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TooLarge;

/// Stacks under construction.
pub(crate) struct StacksBuilder {
    stacks: Stacks,
    /// Never iterated.
    frame_numbers: HashMap<Box<str>, u32>,
    /// Never iterated.
    stack_numbers: HashMap<Stack, u32>,
    held_bytes: u64,
    limit_bytes: u64,
}

impl StacksBuilder {
    /// Creates empty stacks that take at most `limit_bytes`.
    pub(crate) fn new(limit_bytes: u64) -> Self {
        let (frame_numbers, stack_numbers) = (HashMap::new(), HashMap::new());
        StacksBuilder { stacks: Stacks::default(), frame_numbers, stack_numbers, held_bytes: 0, limit_bytes }
    }

    pub(crate) fn limit_bytes(&self) -> u64 {
        self.limit_bytes
    }

    /// Returns the number of a frame, which is new if no equal frame was added before.
    pub(crate) fn frame(&mut self, text: String) -> Result<u32, TooLarge> {
        if let Some(number) = self.frame_numbers.get(text.as_str()) {
            return Ok(*number);
        }
        self.hold(2 * (size_of::<Box<str>>() + text.len()) + size_of::<u32>())?;
        let number = self.stacks.frames.len() as u32;
        self.stacks.frames.push(text.as_str().into());
        self.frame_numbers.insert(text.into(), number);
        Ok(number)
    }

    /// Returns the number of a stack, which is new if no equal stack was added before.
    pub(crate) fn stack(&mut self, frames: Vec<u32>, frames_omitted: u64) -> Result<u32, TooLarge> {
        let stack = Stack { frames: frames.into(), frames_omitted };
        if let Some(number) = self.stack_numbers.get(&stack) {
            return Ok(*number);
        }
        self.hold(2 * (size_of::<Stack>() + size_of_val(&*stack.frames)) + size_of::<u32>())?;
        let number = self.stacks.stacks.len() as u32;
        self.stacks.stacks.push(stack.clone());
        self.stack_numbers.insert(stack, number);
        Ok(number)
    }

    /// Adds the stack of the next allocation.
    pub(crate) fn allocate(&mut self, stack: Option<u32>) -> Result<(), TooLarge> {
        self.hold(size_of::<u32>())?;
        self.stacks.of_allocations.push(stack.map_or(0, |number| number + 1));
        Ok(())
    }

    /// Returns the stacks; `None` if no allocation has one.
    pub(crate) fn finish(self) -> Option<Stacks> {
        (!self.stacks.stacks.is_empty()).then_some(self.stacks)
    }

    /// Counts bytes against the limit. Every entry is counted, so no table can reach 2^32 entries unless the limit is
    /// 16 GiB or more.
    fn hold(&mut self, bytes: usize) -> Result<(), TooLarge> {
        self.held_bytes += bytes as u64;
        let is_numbered = self.stacks.frames.len().max(self.stacks.stacks.len()) < u32::MAX as usize;
        if self.held_bytes <= self.limit_bytes && is_numbered { Ok(()) } else { Err(TooLarge) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_frames_and_stacks_are_stored_once() {
        let mut builder = StacksBuilder::new(u64::MAX);
        let frames = ["a", "b", "a"].map(|text| builder.frame(text.to_owned()).unwrap());
        assert_eq!(frames, [0, 1, 0]);
        let stacks = [(vec![0, 1], 0), (vec![0], 0), (vec![0, 1], 0), (vec![0, 1], 2)];
        let stacks = stacks.map(|(frames, omitted)| builder.stack(frames, omitted).unwrap());
        assert_eq!(stacks, [0, 1, 0, 2]);
        [Some(2), None, Some(0)].into_iter().for_each(|stack| builder.allocate(stack).unwrap());
        let stacks = builder.finish().unwrap();
        assert_eq!((stacks.frames().len(), stacks.stacks().len()), (2, 3));
        assert_eq!([0, 1, 2, 3].map(|id| stacks.of(AllocationId(id))), [Some(2), None, Some(0), None]);
        assert_eq!((&*stacks.stacks()[2].frames, stacks.stacks()[2].frames_omitted), (&[0, 1][..], 2));
    }

    #[test]
    fn stacks_beyond_the_memory_limit_are_refused() {
        let mut builder = StacksBuilder::new(10_000);
        assert_eq!(builder.frame("x".repeat(6_000)), Err(TooLarge));
        let mut builder = StacksBuilder::new(10_000);
        assert!((0..10_000).any(|n| builder.stack(vec![n], 0).is_err()));
        let mut builder = StacksBuilder::new(10_000);
        assert!((0..10_000).any(|_| builder.allocate(None).is_err()));
    }
}
