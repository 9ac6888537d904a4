//! Numbers for streams that come and go.
//!
//! A stream gets its number when the program first allocates or frees on it, in the order in which that happens. A number of a stream
//! that is gone goes to the next new stream, the lowest first: so the same program gives the same numbers, whatever handles
//! the driver gives, and a program that makes and destroys streams for ever needs no more numbers than it has streams at once.

use std::collections::BTreeSet;
use std::hash::Hash;

/// A stream of a program, while it lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum StreamName {
    /// The default stream that all threads share.
    Legacy,
    /// A thread's own default stream, by a number of the thread.
    PerThread(u64),
    /// A stream that the program made.
    Handle(usize),
}

/// The numbers of one context's streams. `K` names a stream while it lives.
#[derive(Debug)]
pub(crate) struct Numbers<K> {
    by_stream: rustc_hash::FxHashMap<K, u16>,
    free: BTreeSet<u16>,
}

/// A number for a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Number {
    /// The stream has it.
    Known(u16),
    /// Another stream had it, which is gone.
    Reused(u16),
    /// Nobody had it: the allocator gives the next.
    New,
}

impl<K: Copy + Eq + Hash> Numbers<K> {
    pub(crate) fn new() -> Self {
        Numbers { by_stream: rustc_hash::FxHashMap::default(), free: BTreeSet::new() }
    }

    /// Which number the stream has, or is to get.
    pub(crate) fn number_for(&self, stream: K) -> Number {
        match (self.by_stream.get(&stream), self.free.first()) {
            (Some(number), _) => Number::Known(*number),
            (None, Some(number)) => Number::Reused(*number),
            (None, None) => Number::New,
        }
    }

    /// The stream has the number from now on.
    pub(crate) fn give(&mut self, stream: K, number: u16) {
        self.free.remove(&number);
        let before = self.by_stream.insert(stream, number);
        assert!(before.is_none(), "a stream has one number");
    }

    /// The number of a stream, if it has one.
    pub(crate) fn get(&self, stream: K) -> Option<u16> {
        self.by_stream.get(&stream).copied()
    }

    /// The stream is gone.
    pub(crate) fn take_back(&mut self, stream: K) -> Option<u16> {
        let number = self.by_stream.remove(&stream)?;
        self.free.insert(number);
        Some(number)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// What a program does with its streams; a handle may come back as another stream.
    #[derive(Clone, Debug)]
    enum Step {
        Use(u8),
        Destroy(u8),
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let step = prop_oneof![3 => (0_u8..12).prop_map(Step::Use), 2 => (0_u8..12).prop_map(Step::Destroy)];
        prop::collection::vec(step, 0..200)
    }

    /// The rule, written naively: slots, each with the stream that has it.
    #[derive(Default)]
    struct Model(Vec<Option<u8>>);

    impl Model {
        fn number(&mut self, stream: u8) -> u16 {
            let slot = self.0.iter().position(|slot| *slot == Some(stream));
            let slot = slot.or_else(|| self.0.iter().position(Option::is_none));
            let slot = slot.unwrap_or_else(|| {
                self.0.push(None);
                self.0.len() - 1
            });
            self.0[slot] = Some(stream);
            slot as u16
        }
    }

    fn run(steps: &[Step], name: impl Fn(u8) -> u64) -> Vec<u16> {
        let (mut numbers, mut next, mut given) = (Numbers::new(), 0, Vec::new());
        for step in steps {
            match step {
                Step::Use(stream) => {
                    let number = match numbers.number_for(name(*stream)) {
                        Number::Known(number) => number,
                        Number::Reused(number) => {
                            numbers.give(name(*stream), number);
                            number
                        }
                        Number::New => {
                            numbers.give(name(*stream), next);
                            next += 1;
                            next - 1
                        }
                    };
                    assert_eq!(numbers.get(name(*stream)), Some(number));
                    given.push(number);
                }
                Step::Destroy(stream) => {
                    numbers.take_back(name(*stream));
                }
            }
        }
        given
    }

    proptest! {
        #[test]
        fn numbers_follow_the_order_of_first_uses(steps in steps()) {
            let mut model = Model::default();
            let mut expected = Vec::new();
            for step in &steps {
                match step {
                    Step::Use(stream) => expected.push(model.number(*stream)),
                    Step::Destroy(stream) => model.0.iter_mut().filter(|slot| **slot == Some(*stream)).for_each(|slot| *slot = None),
                }
            }
            prop_assert_eq!(run(&steps, u64::from), expected);
        }

        #[test]
        fn numbers_do_not_depend_on_handles(steps in steps(), seed in any::<u64>()) {
            let other = |stream: u8| (u64::from(stream) ^ seed).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            prop_assert_eq!(run(&steps, u64::from), run(&steps, other));
        }
    }
}
