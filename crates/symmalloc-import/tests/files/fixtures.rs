//! Snapshots from CPython and PyTorch: intact, damaged and truncated. `fixtures/make.py` created them, and converted the same job to a
//! trace independently.

use std::io::{Read, Write};
use std::path::{Path, PathBuf};

use proptest::prelude::*;
use symmalloc_import::compression::{Compression, CompressionError, Compressor, open};
use symmalloc_import::{
    Format, ImportErrorKind, PickleError, ReadOptions, Recording, SnapshotError, read_bytes, read_from, read_path,
};
use symmalloc_trace::TraceWriter;

const SNAPSHOTS: [&str; 5] = [
    "job.protocol2.pickle.gz",
    "job.protocol3.pickle.gz",
    "job.protocol4.pickle.gz",
    "job.protocol5.pickle.gz",
    "job.cpp.pickle.gz",
];

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

/// Returns the pickle in a fixture, decompressed.
fn pickle(name: &str) -> Vec<u8> {
    let mut bytes = Vec::new();
    open(&fixture(name)).unwrap().read_to_end(&mut bytes).unwrap();
    bytes
}

fn recorded(name: &str) -> Recording {
    read_path(&fixture(name), &ReadOptions::default()).unwrap_or_else(|error| panic!("{error}"))
}

fn compressed(bytes: &[u8], compression: Compression) -> Vec<u8> {
    let mut compressor = Compressor::new(Vec::new(), compression).unwrap();
    compressor.write_all(bytes).unwrap();
    compressor.finish().unwrap()
}

#[test]
fn every_protocol_and_writer_gives_the_ops_of_the_independent_conversion() {
    let expected = recorded("job.trace");
    assert_eq!(expected.format, Format::Trace);
    assert!(expected.summary.allocations > 700 && expected.summary.record_uses > 100);
    for name in SNAPSHOTS {
        let recording = recorded(name);
        assert_eq!((recording.format, recording.compression), (Format::PyTorchSnapshot, Compression::Gzip));
        assert_eq!(recording.summary.device, Some(1));
        for (number, (found, expected)) in recording.records.iter().zip(&expected.records).enumerate() {
            assert_eq!(found, expected, "{name}, record {number}");
        }
        assert_eq!(recording.records.len(), expected.records.len(), "{name}");
        assert_eq!(recording.summary.placements, expected.summary.placements);
    }
}

#[test]
fn every_compression_and_source_gives_the_same_recording() {
    let bytes = pickle(SNAPSHOTS[2]);
    let expected = recorded("job.trace").records;
    for compression in [Compression::Plain, Compression::Gzip, Compression::Zstd] {
        let stored = compressed(&bytes, compression);
        let recording = read_bytes(&stored, &ReadOptions::default()).unwrap();
        assert_eq!((recording.compression, &recording.records), (compression, &expected));
        assert_eq!(read_from(&stored[..], &ReadOptions::default()).unwrap(), recording);
    }
}

#[test]
fn a_snapshot_becomes_a_trace_and_is_read_back() {
    let recording = recorded(SNAPSHOTS[0]);
    let folder = tempfile::tempdir().unwrap();
    for name in ["job.trace", "job.trace.gz", "job.trace.zst"] {
        let path = folder.path().join(name);
        let mut writer = TraceWriter::new(Compressor::create(&path).unwrap(), None).unwrap();
        recording.records.iter().for_each(|record| writer.write(record).unwrap());
        writer.finish().unwrap().finish().unwrap();
        let back = read_path(&path, &ReadOptions::default()).unwrap();
        assert_eq!(back.format, Format::Trace);
        assert_eq!(back.records, recording.records);
    }
}

#[test]
fn every_cut_of_a_snapshot_is_torn() {
    for name in SNAPSHOTS {
        let bytes = pickle(name);
        for kept in (0..bytes.len()).step_by(bytes.len() / 97) {
            match read_bytes(&bytes[..kept], &ReadOptions::default().accept_torn()).unwrap_err().kind() {
                ImportErrorKind::Empty if kept == 0 => {}
                ImportErrorKind::Snapshot(SnapshotError::Pickle(PickleError::Torn { offset })) => {
                    assert_eq!(*offset, kept as u64);
                }
                other => panic!("{name} cut at {kept}: {other}"),
            }
        }
        let stored = std::fs::read(fixture(name)).unwrap();
        let error = read_bytes(&stored[..stored.len() / 2], &ReadOptions::default()).unwrap_err();
        assert!(matches!(error.kind(), ImportErrorKind::Compression(CompressionError::Torn { .. })), "{error}");
    }
}

#[test]
fn a_recording_beyond_the_memory_limit_is_refused() {
    let error = read_path(&fixture(SNAPSHOTS[3]), &ReadOptions::default().memory_limit_bytes(20_000)).unwrap_err();
    assert!(matches!(
        error.kind(),
        ImportErrorKind::Snapshot(SnapshotError::Pickle(PickleError::TooLarge { limit_bytes: 20_000, .. }))
    ));
    assert!(error.to_string().starts_with(&fixture(SNAPSHOTS[3]).display().to_string()), "{error}");

    // One entry, fetched repeatedly: little to keep of the pickle, but many ops.
    let pushes = |bytes: &mut Vec<u8>, texts: &[&str]| {
        texts.iter().for_each(|text| bytes.extend([&[0x8c, text.len() as u8], text.as_bytes()].concat()));
    };
    let mut bytes = b"\x80\x04}".to_vec();
    pushes(&mut bytes, &["device_traces"]);
    bytes.extend(b"]](}(");
    pushes(&mut bytes, &["action", "alloc", "addr"]);
    bytes.extend(b"K\x01");
    pushes(&mut bytes, &["size"]);
    bytes.extend(b"K\x01");
    pushes(&mut bytes, &["stream"]);
    bytes.extend(b"K\x01u\x94");
    bytes.extend(b"h\x00".repeat(10_000));
    bytes.extend(b"eas.");
    assert_eq!(read_bytes(&bytes, &ReadOptions::default()).unwrap().summary.allocations, 10_001);
    let error = read_bytes(&bytes, &ReadOptions::default().memory_limit_bytes(500_000)).unwrap_err();
    assert!(matches!(error.kind(), ImportErrorKind::Snapshot(SnapshotError::TooLarge { .. })), "{error}");

    let error = read_path(&fixture("job.trace"), &ReadOptions::default().memory_limit_bytes(20_000)).unwrap_err();
    assert!(matches!(error.kind(), ImportErrorKind::TooLarge { limit_bytes: 20_000 }), "{error}");
}

#[test]
fn a_torn_trace_can_be_read_up_to_the_tear() {
    // Large enough for several blocks of either compression.
    let mut text = b"symmalloc-trace 1\nstream s0\n".to_vec();
    for id in 0..50_000u64 {
        text.extend(format!("a {id} {} s0\n", id.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 30).bytes());
    }
    text.extend(b"end 50001\n");
    let whole = read_bytes(&text, &ReadOptions::default()).unwrap().records;
    let (strict, lenient) = (ReadOptions::default(), ReadOptions::default().accept_torn());
    for compression in [Compression::Plain, Compression::Gzip, Compression::Zstd] {
        let stored = compressed(&text, compression);
        for kept in [stored.len() * 2 / 3, stored.len() - 12] {
            let torn = &stored[..kept];
            assert!(read_bytes(torn, &strict).is_err());
            let recording = read_bytes(torn, &lenient).unwrap();
            assert!(recording.summary.torn_at_line.is_some());
            assert!((10_000..=whole.len()).contains(&recording.records.len()), "{}", recording.records.len());
            assert_eq!(recording.records, whole[..recording.records.len()]);
        }
    }
    let recording = read_bytes(&text[..text.len() / 2], &lenient).unwrap();
    assert_eq!(recording.summary.torn_at_line, Some(recording.records.len() as u64 + 2));
}

#[test]
fn what_is_no_recording_says_what_would_be_one() {
    let error = |bytes: &[u8]| read_bytes(bytes, &ReadOptions::default()).unwrap_err();
    assert!(matches!(error(b"").kind(), ImportErrorKind::Empty));
    assert!(matches!(error(b"PK\x03\x04rest").kind(), ImportErrorKind::ZipArchive));
    assert!(matches!(error(b"symm").kind(), ImportErrorKind::Trace(_)));
    assert!(matches!(error(b"Thread,Time,Action\n").kind(), ImportErrorKind::Rmm(_)));
    for bytes in [&b"hello"[..], b"{\"a\": 1}", b"\x00", b"(dp0\n."] {
        assert!(matches!(error(bytes).kind(), ImportErrorKind::UnknownFormat), "{}", error(bytes));
    }
    let missing = read_path(&fixture("no such file"), &ReadOptions::default()).unwrap_err();
    assert!(matches!(missing.kind(), ImportErrorKind::Open(_)));
    assert_eq!(missing.path(), Some(&*fixture("no such file")));
}

/// A modification of a file.
#[derive(Clone, Debug)]
enum Damage {
    Set { at: prop::sample::Index, byte: u8 },
    Remove { from: prop::sample::Index, count: usize },
    Repeat { from: prop::sample::Index, count: usize, to: prop::sample::Index },
}

impl Damage {
    fn any() -> impl Strategy<Value = Damage> {
        let index = any::<prop::sample::Index>;
        prop_oneof![
            (index(), any::<u8>()).prop_map(|(at, byte)| Damage::Set { at, byte }),
            (index(), 1..200usize).prop_map(|(from, count)| Damage::Remove { from, count }),
            (index(), 1..200usize, index()).prop_map(|(from, count, to)| Damage::Repeat { from, count, to }),
        ]
    }

    fn apply(&self, bytes: &mut Vec<u8>) {
        if bytes.is_empty() {
            return;
        }
        match self {
            Damage::Set { at, byte } => *at.get_mut(bytes) = *byte,
            Damage::Remove { from, count } => {
                let from = from.index(bytes.len());
                bytes.drain(from..bytes.len().min(from + count));
            }
            Damage::Repeat { from, count, to } => {
                let from = from.index(bytes.len());
                let part = bytes[from..bytes.len().min(from + count)].to_vec();
                let to = to.index(bytes.len());
                bytes.splice(to..to, part);
            }
        }
    }
}

/// Any recording read from a damaged file is a consistent list of records.
fn read_damaged(bytes: &[u8]) {
    let options = ReadOptions::default().memory_limit_bytes(64 << 20);
    for options in [options.clone(), options.accept_torn()] {
        if let Ok(recording) = read_bytes(bytes, &options) {
            let mut writer = TraceWriter::new(std::io::sink(), recording.config.as_ref()).unwrap();
            recording.records.iter().for_each(|record| writer.write(record).unwrap());
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn damaged_snapshots_are_read_or_refused(
        name in prop::sample::select(&SNAPSHOTS[..]),
        damage in prop::collection::vec(Damage::any(), 1..4),
    ) {
        let mut bytes = pickle(name);
        damage.iter().for_each(|damage| damage.apply(&mut bytes));
        read_damaged(&bytes);
    }

    #[test]
    fn damaged_compressed_snapshots_are_read_or_refused(
        name in prop::sample::select(&SNAPSHOTS[..]),
        damage in prop::collection::vec(Damage::any(), 1..4),
    ) {
        let mut bytes = std::fs::read(fixture(name)).unwrap();
        damage.iter().for_each(|damage| damage.apply(&mut bytes));
        read_damaged(&bytes);
    }

    #[test]
    fn damaged_text_is_read_or_refused(
        damage in prop::collection::vec(Damage::any(), 1..4),
    ) {
        let mut trace = std::fs::read(fixture("job.trace")).unwrap();
        let mut log = b"Thread,Time,Action,Pointer,Size,Stream\n".to_vec();
        for n in 0..50 {
            log.extend(format!("1,0,{},0x{:x},{},0x{:x}\n", ["allocate", "free"][n % 2], n / 2 + 1, n, n % 3).bytes());
        }
        damage.iter().for_each(|damage| damage.apply(&mut trace));
        damage.iter().for_each(|damage| damage.apply(&mut log));
        read_damaged(&trace);
        read_damaged(&log);
    }

    #[test]
    fn any_bytes_are_read_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        read_damaged(&bytes);
    }
}
