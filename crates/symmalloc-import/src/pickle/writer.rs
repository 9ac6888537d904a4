//! A small pickle writer for tests. It has one method per opcode, so that tests can write both valid and invalid
//! pickles.

use super::opcode;

/// A pickle under construction.
#[derive(Clone)]
pub(crate) struct Pickle(Vec<u8>);

impl Pickle {
    pub(crate) fn of_protocol(protocol: u8) -> Self {
        Pickle(vec![opcode::PROTO, protocol])
    }

    /// Appends STOP and returns the pickle.
    pub(crate) fn stop(self) -> Vec<u8> {
        self.op(opcode::STOP).0
    }

    /// Returns the bytes so far.
    pub(crate) fn unfinished(self) -> Vec<u8> {
        self.0
    }

    pub(crate) fn op(self, opcode: u8) -> Self {
        self.raw(&[opcode])
    }

    pub(crate) fn raw(mut self, bytes: &[u8]) -> Self {
        self.0.extend_from_slice(bytes);
        self
    }

    pub(crate) fn dict(self) -> Self {
        self.op(opcode::EMPTY_DICT)
    }

    pub(crate) fn list(self) -> Self {
        self.op(opcode::EMPTY_LIST)
    }

    pub(crate) fn mark(self) -> Self {
        self.op(opcode::MARK)
    }

    pub(crate) fn text(self, text: &str) -> Self {
        let length = u32::try_from(text.len()).unwrap();
        self.op(opcode::BINUNICODE).raw(&length.to_le_bytes()).raw(text.as_bytes())
    }

    /// Appends an integer as PyTorch's C++ writer encodes it: always in eight bytes.
    pub(crate) fn integer(self, integer: i64) -> Self {
        self.op(opcode::LONG1).raw(&[8]).raw(&integer.to_le_bytes())
    }

    pub(crate) fn put(self, index: u32) -> Self {
        self.op(opcode::LONG_BINPUT).raw(&index.to_le_bytes())
    }

    pub(crate) fn fetch(self, index: u32) -> Self {
        self.op(opcode::LONG_BINGET).raw(&index.to_le_bytes())
    }

    pub(crate) fn frame(self, length_bytes: u64) -> Self {
        self.op(opcode::FRAME).raw(&length_bytes.to_le_bytes())
    }
}
