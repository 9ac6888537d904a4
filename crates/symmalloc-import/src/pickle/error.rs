//! Errors in a pickle.

use std::io;

use symmalloc_core::units::Amount;

/// Error reading a pickle. Offsets are in decompressed bytes from the start of the pickle.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PickleError {
    /// The source failed.
    #[error("the pickle cannot be read at byte {offset}")]
    Read {
        /// Offset of the next byte to read.
        offset: u64,
        /// The source's error.
        source: io::Error,
    },
    /// The pickle is truncated.
    #[error("the pickle ends at byte {offset}, before its STOP: the file was cut off; save or copy it again")]
    Torn {
        /// Offset at which the data ends.
        offset: u64,
    },
    /// The protocol is not one of 2 to 5.
    #[error("the file does not start like a pickle of protocol 2 to 5 (found byte {first:#04x}, then {second:#04x})")]
    Protocol {
        /// The first byte. In a pickle, it is 0x80.
        first: u8,
        /// The second byte. In a pickle, it is the protocol.
        second: u8,
    },
    /// The pickle contains an opcode that imports, calls or loads something. The reader rejects these opcodes.
    #[error(
        "the pickle contains an opcode that runs code ({opcode} at byte {offset}), which is rejected: a memory snapshot needs only \
         dicts, lists, numbers and text, so save it with torch.cuda.memory._dump_snapshot"
    )]
    Executes {
        /// The opcode's name.
        opcode: &'static str,
        /// Offset of the opcode.
        offset: u64,
    },
    /// The opcode is not one that Python or PyTorch write in protocols 2 to 5.
    #[error("byte {offset} of the pickle is {byte:#04x}, which no pickle of protocol 2 to 5 has there")]
    UnknownOpcode {
        /// The byte.
        byte: u8,
        /// Offset of the byte.
        offset: u64,
    },
    /// An opcode pops more values than the stack has.
    #[error("the pickle pops more values than it pushed, at byte {offset}: the file is damaged")]
    StackUnderflow {
        /// Offset of the opcode.
        offset: u64,
    },
    /// An opcode adds items to a value that cannot contain them, or adds half of a key-value pair.
    #[error("the pickle adds items to something that cannot take them, at byte {offset}: the file is damaged")]
    WrongContainer {
        /// Offset of the opcode.
        offset: u64,
    },
    /// An opcode reads a memo index under which nothing was stored.
    #[error("the pickle fetches memo {index}, which it never stored, at byte {offset}: the file is damaged")]
    NotInMemo {
        /// The index.
        index: u32,
        /// Offset of the opcode.
        offset: u64,
    },
    /// A memo index is far above all earlier ones. All known writers count up.
    #[error("the pickle stores memo {index} after only {stored} others, at byte {offset}: the file is damaged")]
    MemoGap {
        /// The memo index.
        index: u32,
        /// Number of memo entries.
        stored: u64,
        /// Offset of the opcode.
        offset: u64,
    },
    /// A frame of protocol 4 or 5 that does not end at the end of an opcode.
    #[error(
        "the pickle's frame at byte {offset} states {length_bytes} bytes, but no opcode ends there: the file is damaged"
    )]
    FrameLength {
        /// Offset of the frame's opcode.
        offset: u64,
        /// The length that the frame states.
        length_bytes: u64,
    },
    /// The pickle stops with more than one value, or with none.
    #[error("the pickle stops at byte {offset} with {values} values instead of one: the file is damaged")]
    Unfinished {
        /// Offset of STOP.
        offset: u64,
        /// Values left on the stack.
        values: u64,
    },
    /// Data follows the end of the pickle.
    #[error("data follows the end of the pickle, at byte {offset}: remove it, or save the snapshot again")]
    TrailingBytes {
        /// Offset of the first extra byte.
        offset: u64,
    },
    /// The kept parts of the pickle exceed the caller's memory limit.
    #[error(
        "the pickle needs more than {} of memory at byte {offset}: raise the limit if you trust the file",
        Amount(*limit_bytes)
    )]
    TooLarge {
        /// The limit.
        limit_bytes: u64,
        /// Offset that the reader had reached.
        offset: u64,
    },
}
