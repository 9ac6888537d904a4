//! Numbers for streams that are created and destroyed.
//!
//! A stream gets its number when the program first allocates or frees on it, in the order of these first uses. The number of a destroyed
//! stream is given to the next new stream, lowest number first. Every run of a program therefore assigns the same numbers, regardless of
//! the handles that the driver returns. A program that keeps creating and destroying streams needs only as many numbers as it has streams
//! at the same time.

use std::collections::BTreeSet;
use std::hash::Hash;

/// The name of a live stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum StreamName {
    /// The default stream that all threads share.
    Legacy,
    /// A per-thread default stream, by the number of the thread.
    PerThread(u64),
    /// A stream that the program created, by its handle.
    Handle(usize),
}

/// The numbers of one context's streams. `K` identifies a live stream.
#[derive(Debug)]
pub(crate) struct Numbers<K> {
    by_stream: rustc_hash::FxHashMap<K, u16>,
    free: BTreeSet<u16>,
}

/// The number of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Number {
    /// The stream already has this number.
    Known(u16),
    /// A destroyed stream had this number.
    Reused(u16),
    /// The allocator must assign the next unused number.
    New,
}

impl<K: Copy + Eq + Hash> Numbers<K> {
    pub(crate) fn new() -> Self {
        Numbers { by_stream: rustc_hash::FxHashMap::default(), free: BTreeSet::new() }
    }

    /// Returns the stream's number, or the number that the stream must get.
    pub(crate) fn number_for(&self, stream: K) -> Number {
        match (self.by_stream.get(&stream), self.free.first()) {
            (Some(number), _) => Number::Known(*number),
            (None, Some(number)) => Number::Reused(*number),
            (None, None) => Number::New,
        }
    }

    /// Assigns the number to the stream.
    pub(crate) fn give(&mut self, stream: K, number: u16) {
        self.free.remove(&number);
        let before = self.by_stream.insert(stream, number);
        assert!(before.is_none(), "the stream must not have a number yet");
    }

    /// Returns the number of a stream, if it has one.
    pub(crate) fn get(&self, stream: K) -> Option<u16> {
        self.by_stream.get(&stream).copied()
    }

    /// Releases the number of a destroyed stream.
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

    /// A program's use of streams. A handle may be reused for another stream.
    #[derive(Clone, Debug)]
    enum Step {
        Use(u8),
        Destroy(u8),
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let step = prop_oneof![3 => (0_u8..12).prop_map(Step::Use), 2 => (0_u8..12).prop_map(Step::Destroy)];
        prop::collection::vec(step, 0..200)
    }

    /// A naive implementation of the rule: slots with the stream that occupies each.
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
