//! What can be wrong with a pickle.

use std::io;

use symmalloc_core::units::Amount;

/// Why a pickle could not be read. Offsets count decompressed bytes from the start of the pickle.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PickleError {
    /// The source failed.
    #[error("the pickle cannot be read at byte {offset}")]
    Read {
        /// The next byte wanted.
        offset: u64,
        /// What the source said.
        source: io::Error,
    },
    /// The pickle ends in the middle.
    #[error("the pickle ends at byte {offset}, before its STOP: the file was cut off; save or copy it again")]
    Torn {
        /// Where the data ends.
        offset: u64,
    },
    /// Not one of the protocols 2 to 5.
    #[error("the file does not start like a pickle of protocol 2 to 5 (found byte {first:#04x}, then {second:#04x})")]
    Protocol {
        /// The first byte; 0x80 in a pickle.
        first: u8,
        /// The second byte; the protocol in a pickle.
        second: u8,
    },
    /// The pickle wants to import, call or fetch something. This reader never does.
    #[error(
        "the pickle asks to run code ({opcode} at byte {offset}), which is never done: a memory snapshot needs only \
         dicts, lists, numbers and text, so save it with torch.cuda.memory._dump_snapshot"
    )]
    Executes {
        /// The opcode's name.
        opcode: &'static str,
        /// Where it stands.
        offset: u64,
    },
    /// No opcode of protocols 2 to 5 as Python or PyTorch write them.
    #[error("byte {offset} of the pickle is {byte:#04x}, which no pickle of protocol 2 to 5 has there")]
    UnknownOpcode {
        /// The byte.
        byte: u8,
        /// Where it stands.
        offset: u64,
    },
    /// An opcode takes more from the stack than there is.
    #[error("the pickle takes more than it has made, at byte {offset}: the file is damaged")]
    StackUnderflow {
        /// Where the opcode stands.
        offset: u64,
    },
    /// An opcode adds to something that is not of the kind it adds to, or adds half a pair.
    #[error("the pickle adds items to something that cannot take them, at byte {offset}: the file is damaged")]
    WrongContainer {
        /// Where the opcode stands.
        offset: u64,
    },
    /// A memo index that nothing was stored under.
    #[error("the pickle fetches memo {index}, which it never stored, at byte {offset}: the file is damaged")]
    NotInMemo {
        /// The index.
        index: u32,
        /// Where the opcode stands.
        offset: u64,
    },
    /// A memo index far beyond all earlier ones; every known writer counts upwards.
    #[error("the pickle stores memo {index} after only {stored} others, at byte {offset}: the file is damaged")]
    MemoGap {
        /// The index.
        index: u32,
        /// How many memo entries there are.
        stored: u64,
        /// Where the opcode stands.
        offset: u64,
    },
    /// A frame of protocol 4 or 5 that does not end where an opcode ends.
    #[error(
        "the pickle's frame at byte {offset} says {length_bytes} bytes, but no opcode ends there: the file is damaged"
    )]
    FrameLength {
        /// Where the frame's opcode stands.
        offset: u64,
        /// The length that the frame announces.
        length_bytes: u64,
    },
    /// The pickle stops with more than one value, or with none.
    #[error("the pickle stops at byte {offset} with {values} values instead of one: the file is damaged")]
    Unfinished {
        /// Where STOP stands.
        offset: u64,
        /// Values left on the stack.
        values: u64,
    },
    /// Something follows the end of the pickle.
    #[error("something follows the end of the pickle, at byte {offset}: cut it off, or save the snapshot again")]
    TrailingBytes {
        /// The first byte too many.
        offset: u64,
    },
    /// What must be kept of the pickle is more than the caller allows.
    #[error(
        "the pickle needs more than {} of memory at byte {offset}: raise the limit if you trust the file",
        Amount(*limit_bytes)
    )]
    TooLarge {
        /// The limit.
        limit_bytes: u64,
        /// How far the reader came.
        offset: u64,
    },
}
