//! Tests of the pickle reader: the values it keeps, and its behavior on hostile files.

use proptest::prelude::*;

use super::writer::Pickle;
use super::*;

const VOCABULARY: &[&str] = &["size", "addr", "alloc"];
const SIZE: Word = Word(0);
const ADDR: Word = Word(1);
const ALLOC: Word = Word(2);

const EVERYTHING: Vocabulary<'static> =
    Vocabulary { words: VOCABULARY, texts_of: &[], shared_lists_of: &[], keeps: &|_, _| Kept::Always };

const LIMIT_BYTES: u64 = 1 << 20;

fn read_pickle(bytes: &[u8]) -> Result<Document, PickleError> {
    read(bytes, EVERYTHING, LIMIT_BYTES)
}

fn document(bytes: &[u8]) -> Document {
    match read_pickle(bytes) {
        Ok(document) => document,
        Err(error) => panic!("{error}"),
    }
}

fn error(bytes: &[u8]) -> PickleError {
    read_pickle(bytes).err().expect("the pickle is refused")
}

fn pickle() -> Pickle {
    Pickle::of_protocol(4)
}

/// Returns the only value of a pickle.
fn root(pickle: Pickle) -> Value {
    document(&pickle.stop()).root
}

fn root_list(document: &Document) -> &List {
    match document.root {
        Value::List(list) => document.values.list(list),
        other => panic!("{other:?} is not a list"),
    }
}

fn field(document: &Document, word: Word) -> Option<Value> {
    match document.root {
        Value::Dict(dict) => document.values.field(dict, word),
        other => panic!("{other:?} is not a dict"),
    }
}

#[test]
fn dicts_keep_the_entries_whose_key_is_a_word() {
    let bytes = pickle()
        .dict()
        .mark()
        .text("size")
        .integer(512)
        .text("frames")
        .integer(7)
        .integer(3)
        .text("alloc")
        .op(opcode::SETITEMS)
        .text("addr")
        .text("alloc")
        .op(opcode::SETITEM)
        .text("size")
        .integer(1024)
        .op(opcode::SETITEM)
        .stop();
    let document = document(&bytes);
    assert_eq!(field(&document, SIZE), Some(Value::Integer(1024)));
    assert_eq!(field(&document, ADDR), Some(Value::Word(ALLOC)));
    assert_eq!(field(&document, ALLOC), None);
}

#[test]
fn lists_and_tuples_keep_dicts_that_hold_something_and_count_the_rest() {
    let full = pickle().dict().text("size").integer(1).op(opcode::SETITEM).put(0).op(opcode::POP);
    let frame = full.dict().text("line").integer(1).op(opcode::SETITEM).put(1).op(opcode::POP);
    let items = |pickle: Pickle| pickle.fetch(0).fetch(1).integer(5).list().text("size").fetch(0);
    for bytes in [
        items(frame.clone().list().mark()).op(opcode::APPENDS).stop(),
        items(frame.clone().mark()).op(opcode::TUPLE).stop(),
    ] {
        let document = document(&bytes);
        let list = root_list(&document);
        assert_eq!(list.len, 6);
        assert!(matches!(list.items[..], [Item::Dict(a), Item::List(_), Item::Dict(b)] if a == b));
        assert!(!list.is_whole());
    }
    let document = document(&frame.list().fetch(0).op(opcode::APPEND).stop());
    assert!(root_list(&document).is_whole());
}

#[test]
fn integers_of_every_encoding_and_width_are_read() {
    let long = |bytes: &[u8]| pickle().op(opcode::LONG1).raw(&[bytes.len() as u8]).raw(bytes);
    for (written, read) in [
        (pickle().op(opcode::BININT1).raw(&[255]), Value::Integer(255)),
        (pickle().op(opcode::BININT2).raw(&[0xff, 0xff]), Value::Integer(65_535)),
        (pickle().op(opcode::BININT).raw(&i32::MAX.to_le_bytes()), Value::Integer(2_147_483_647)),
        (pickle().op(opcode::BININT).raw(&(-1i32).to_le_bytes()), Value::OutOfRange),
        (long(&[]), Value::Integer(0)),
        (long(&[0x80]), Value::OutOfRange),
        (long(&[0x80, 0]), Value::Integer(128)),
        (pickle().integer(i64::MAX), Value::Integer(i64::MAX as u64)),
        (pickle().integer(-1), Value::OutOfRange),
        (long(&[255, 255, 255, 255, 255, 255, 255, 255, 0]), Value::Integer(u64::MAX)),
        (long(&[0, 0, 0, 0, 0, 0, 0, 0, 1]), Value::OutOfRange),
        (long(&[255; 9]), Value::OutOfRange),
        (pickle().op(opcode::LONG4).raw(&[2, 0, 0, 0, 0, 1]), Value::Integer(256)),
        (pickle().op(opcode::LONG4).raw(&300u32.to_le_bytes()).raw(&[0; 300]), Value::Integer(0)),
        (pickle().op(opcode::LONG4).raw(&300u32.to_le_bytes()).raw(&[1; 300]), Value::OutOfRange),
    ] {
        assert_eq!(root(written), read);
    }
}

#[test]
fn text_of_every_encoding_is_read_and_other_values_are_ignored() {
    let long = |opcode: u8, length: &[u8]| pickle().op(opcode).raw(length).raw(b"alloc");
    for opcode in [opcode::SHORT_BINUNICODE, opcode::SHORT_BINSTRING] {
        assert_eq!(root(long(opcode, &[5])), Value::Word(ALLOC));
    }
    for opcode in [opcode::BINUNICODE, opcode::BINSTRING] {
        assert_eq!(root(long(opcode, &5u32.to_le_bytes())), Value::Word(ALLOC));
    }
    assert_eq!(root(long(opcode::BINUNICODE8, &5u64.to_le_bytes())), Value::Word(ALLOC));
    for other in [
        long(opcode::SHORT_BINBYTES, &[5]),
        long(opcode::BINBYTES, &5u32.to_le_bytes()),
        long(opcode::BINBYTES8, &5u64.to_le_bytes()),
        long(opcode::BYTEARRAY8, &5u64.to_le_bytes()),
        pickle().op(opcode::BINFLOAT).raw(&[0; 8]),
        pickle().op(opcode::NONE),
        pickle().op(opcode::NEWFALSE),
        pickle().op(opcode::EMPTY_SET).mark().integer(1).op(opcode::ADDITEMS),
        pickle().mark().integer(1).op(opcode::FROZENSET),
    ] {
        assert_eq!(root(other), Value::Nothing);
    }
    assert_eq!(root(pickle().op(opcode::NEWTRUE)), Value::True);
    for text in ["allocation", &"x".repeat(100_000), ""] {
        assert_eq!(root(pickle().text(text)), Value::UnusedText);
    }
}

#[test]
fn marks_pops_and_duplicates_are_executed() {
    assert_eq!(root(pickle().integer(1).mark().op(opcode::POP)), Value::Integer(1));
    assert_eq!(root(pickle().integer(1).mark().integer(2).integer(3).op(opcode::POP_MARK)), Value::Integer(1));
    assert_eq!(root(pickle().integer(1).integer(2).op(opcode::POP)), Value::Integer(1));
    assert_eq!(root(pickle().integer(1).op(opcode::DUP).op(opcode::POP)), Value::Integer(1));
}

#[test]
fn nothing_is_ever_executed() {
    let names: Vec<&str> = (0..=255).filter_map(opcode::executing).inspect(|name| assert!(!name.is_empty())).collect();
    assert_eq!(names.len(), 15);
    for opcode in 0..=255 {
        let Some(name) = opcode::executing(opcode) else { continue };
        let bytes = pickle().integer(1).op(opcode).raw(b"os\nsystem\n").stop();
        assert!(
            matches!(error(&bytes), PickleError::Executes { opcode, offset: 12 } if opcode == name),
            "{name}: {}",
            error(&bytes)
        );
    }
}

#[test]
fn other_bytes_and_other_protocols_are_refused() {
    for byte in [0, b'I', b'L', b'S', b'V', b'p', b'g', b'd', b'l', b'F', 0xff, opcode::PROTO] {
        let bytes = pickle().op(byte).stop();
        assert!(matches!(error(&bytes), PickleError::UnknownOpcode { byte: b, offset: 2 } if b == byte));
    }
    for protocol in [0, 1, 6, 255] {
        assert!(matches!(error(&Pickle::of_protocol(protocol).list().stop()), PickleError::Protocol { .. }));
    }
    assert!(matches!(error(b"(dp0\n."), PickleError::Protocol { first: b'(', .. }));
}

#[test]
fn a_length_without_data_is_torn_and_allocates_nothing() {
    for (opcode, length) in [
        (opcode::SHORT_BINUNICODE, &[255][..]),
        (opcode::BINUNICODE, &[255; 4]),
        (opcode::BINUNICODE8, &[255; 8]),
        (opcode::BINBYTES8, &[255; 8]),
        (opcode::BYTEARRAY8, &[255; 8]),
        (opcode::LONG4, &[255; 4]),
        (opcode::FRAME, &[255; 8]),
    ] {
        let bytes = pickle().op(opcode).raw(length).unfinished();
        let end = bytes.len() as u64;
        assert!(matches!(error(&bytes), PickleError::Torn { offset } if offset == end), "{opcode:#x}");
    }
}

#[test]
fn a_pickle_cut_at_any_byte_is_torn() {
    let bytes =
        pickle().frame(33).dict().mark().text("size").integer(512).text("addr").list().op(opcode::SETITEMS).stop();
    assert!(read_pickle(&bytes).is_ok(), "{}", error(&bytes));
    for end in 0..bytes.len() {
        assert!(matches!(error(&bytes[..end]), PickleError::Torn { offset } if offset == end as u64), "cut at {end}");
    }
}

#[test]
fn data_after_stop_is_refused() {
    let mut bytes = pickle().integer(1).stop();
    bytes.push(b'N');
    assert!(matches!(error(&bytes), PickleError::TrailingBytes { offset: 13 }));
}

#[test]
fn a_pickle_must_leave_one_value() {
    for (pickle, left) in
        [(pickle(), 0), (pickle().integer(1).integer(2), 2), (pickle().mark(), 0), (pickle().integer(1).mark(), 1)]
    {
        let error = error(&pickle.stop());
        assert!(matches!(error, PickleError::Unfinished { values, .. } if values == left), "{error}");
    }
}

#[test]
fn nothing_is_taken_from_an_empty_stack_or_below_a_mark() {
    use opcode::{
        ADDITEMS, APPEND, APPENDS, DUP, FROZENSET, MEMOIZE, POP, POP_MARK, SETITEM, SETITEMS, TUPLE, TUPLE1, TUPLE2,
        TUPLE3,
    };
    for opcode in [
        POP, POP_MARK, DUP, MEMOIZE, SETITEM, SETITEMS, APPEND, APPENDS, TUPLE, TUPLE1, TUPLE2, TUPLE3, ADDITEMS,
        FROZENSET,
    ] {
        let error = error(&pickle().op(opcode).stop());
        assert!(matches!(error, PickleError::StackUnderflow { offset: 2 }), "{opcode:#x}: {error}");
    }
    for opcode in [DUP, MEMOIZE, SETITEM, APPEND, TUPLE1, TUPLE2, TUPLE3] {
        let error = error(&pickle().list().list().list().mark().op(opcode).stop());
        assert!(matches!(error, PickleError::StackUnderflow { offset: 6 }), "{opcode:#x}: {error}");
    }
    for index in [pickle().op(opcode::BINPUT).raw(&[0]), pickle().put(0)] {
        assert!(matches!(error(&index.stop()), PickleError::StackUnderflow { offset: 2 }));
    }
}

#[test]
fn items_are_added_only_to_containers() {
    for pickle in [
        pickle().list().integer(1).integer(2).op(opcode::SETITEM),
        pickle().dict().integer(1).op(opcode::APPEND),
        pickle().dict().mark().integer(1).op(opcode::APPENDS),
        pickle().dict().mark().integer(1).op(opcode::SETITEMS),
        pickle().op(opcode::NONE).mark().integer(1).integer(2).op(opcode::SETITEMS),
    ] {
        assert!(matches!(error(&pickle.stop()), PickleError::WrongContainer { .. }));
    }
}

#[test]
fn memo_indices_count_upwards() {
    assert_eq!(root(pickle().integer(7).put(1).op(opcode::POP).fetch(1)), Value::Integer(7));
    assert_eq!(
        root(pickle().integer(7).put(0).integer(8).put(0).op(opcode::POP).op(opcode::POP).fetch(0)),
        Value::Integer(8)
    );
    assert!(matches!(
        error(&pickle().integer(7).put(u32::MAX).stop()),
        PickleError::MemoGap { index: u32::MAX, stored: 0, offset: 12 }
    ));
    assert!(matches!(error(&pickle().fetch(u32::MAX).stop()), PickleError::NotInMemo { index: u32::MAX, offset: 2 }));
    assert!(matches!(error(&pickle().integer(7).put(1).fetch(0).stop()), PickleError::NotInMemo { index: 0, .. }));
}

#[test]
fn shared_lists_within_shared_lists_stay_small() {
    let mut laughs = pickle().list().put(0);
    for level in 1..1000 {
        laughs = laughs.op(opcode::POP).list().mark();
        for _ in 0..10 {
            laughs = laughs.fetch(level - 1);
        }
        laughs = laughs.op(opcode::APPENDS).put(level);
    }
    let document = document(&laughs.stop());
    assert_eq!(root_list(&document).len, 10);
    assert!(document.values.held_bytes() < 200_000);

    let mut doubled = pickle().list();
    for _ in 0..1000 {
        doubled = doubled.op(opcode::DUP).op(opcode::TUPLE2);
    }
    assert_eq!(root_list(&read(&doubled.stop()[..], EVERYTHING, LIMIT_BYTES).unwrap()).len, 2);
}

#[test]
fn containers_that_hold_themselves_are_read() {
    let document_of_list = document(&pickle().list().put(0).fetch(0).op(opcode::APPEND).stop());
    let list = root_list(&document_of_list);
    assert!(
        matches!((list.items[..].first(), document_of_list.root), (Some(Item::List(a)), Value::List(b)) if *a == b)
    );
    let document_of_dict = document(&pickle().dict().put(0).text("size").fetch(0).op(opcode::SETITEM).stop());
    assert_eq!(field(&document_of_dict, SIZE), Some(document_of_dict.root));
}

#[test]
fn a_million_levels_of_nesting_are_read_and_dropped() {
    let mut bytes = pickle().unfinished();
    bytes.extend(std::iter::repeat_n(opcode::EMPTY_LIST, 1_000_000));
    bytes.extend(std::iter::repeat_n(opcode::APPEND, 999_999));
    bytes.push(opcode::STOP);
    let document = read(&bytes[..], EVERYTHING, 1 << 30).unwrap();
    assert_eq!(root_list(&document).len, 1);
}

#[test]
fn frames_must_end_where_an_opcode_does() {
    for framed in [
        pickle().frame(2).op(opcode::NONE).stop(),
        pickle().frame(1).op(opcode::NONE).frame(1).stop(),
        pickle().frame(1).op(opcode::NONE).stop(),
        pickle().frame(0).op(opcode::NONE).stop(),
    ] {
        assert!(read_pickle(&framed).is_ok(), "{}", error(&framed));
    }
    for (framed, length) in [
        (pickle().frame(5).integer(1).stop(), 5),
        (pickle().frame(9).integer(1).op(opcode::POP).op(opcode::NONE).stop(), 9),
        (pickle().frame(13).op(opcode::NONE).frame(1).op(opcode::POP).op(opcode::NONE).stop(), 13),
        (pickle().frame(100).op(opcode::NONE).stop(), 100),
    ] {
        let error = error(&framed);
        assert!(
            matches!(error, PickleError::FrameLength { offset: 2, length_bytes } if length_bytes == length),
            "{error}"
        );
    }
}

#[test]
fn memory_stays_under_the_limit() {
    let flood = |opcodes: &[u8]| {
        let mut bytes = pickle().unfinished();
        bytes.extend(opcodes.iter().copied().cycle().take(400_000 * opcodes.len()));
        error(&bytes)
    };
    for opcodes in [
        &[opcode::NONE][..],
        &[opcode::MARK],
        &[opcode::EMPTY_LIST, opcode::POP],
        &[opcode::EMPTY_DICT, opcode::POP],
        &[opcode::NONE, opcode::MEMOIZE, opcode::POP],
        &[opcode::EMPTY_LIST, opcode::EMPTY_LIST, opcode::APPEND, opcode::POP],
    ] {
        let error = flood(opcodes);
        assert!(matches!(error, PickleError::TooLarge { limit_bytes: LIMIT_BYTES, .. }), "{opcodes:?}: {error}");
    }
}

proptest! {
    #[test]
    fn any_bytes_are_read_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        let _ = read_pickle(&bytes);
        let _ = read_pickle(&[&[opcode::PROTO, 5][..], &bytes].concat());
    }

    /// Sequences of opcodes reach deeper code than random bytes.
    #[test]
    fn any_opcodes_are_read_or_refused(opcodes in proptest::collection::vec(
        prop_oneof![
            proptest::sample::select(vec![
                opcode::MARK, opcode::POP, opcode::POP_MARK, opcode::DUP, opcode::MEMOIZE, opcode::NONE,
                opcode::EMPTY_DICT, opcode::EMPTY_LIST, opcode::EMPTY_TUPLE, opcode::EMPTY_SET, opcode::SETITEM,
                opcode::SETITEMS, opcode::APPEND, opcode::APPENDS, opcode::TUPLE, opcode::TUPLE1, opcode::TUPLE2,
                opcode::TUPLE3, opcode::ADDITEMS, opcode::FROZENSET,
            ]).prop_map(|opcode| vec![opcode]),
            (0u8..8).prop_map(|index| vec![opcode::BINGET, index]),
            (0u8..8).prop_map(|index| vec![opcode::BINPUT, index]),
            proptest::sample::select(VOCABULARY).prop_map(|word| {
                [&[opcode::SHORT_BINUNICODE, word.len() as u8], word.as_bytes()].concat()
            }),
        ],
        0..60,
    )) {
        let bytes = [vec![opcode::PROTO, 4], opcodes.concat(), vec![opcode::STOP]].concat();
        if let Ok(document) = read_pickle(&bytes) {
            prop_assert!(document.values.held_bytes() <= 48 * opcodes.len() as u64);
        }
    }
}
