use super::*;

const GRANULARITY: u64 = 2 << 20;

fn layout() -> Layout {
    let allocation = |segment, offset_bytes, size_bytes, name: Option<&str>| SharedAllocation {
        segment,
        stream: StreamId(1),
        offset_bytes,
        size_bytes,
        name: name.map(Box::from),
    };
    Layout {
        pid: 17,
        pool: PoolId(3),
        digest: Digest { ops: 9, value: 0x1234 },
        kind: HandleKind::FileDescriptor,
        segments: vec![
            SharedSegment { size_bytes: 8 << 20, chunks: vec![0..2 << 20, 2 << 20..4 << 20, 6 << 20..8 << 20] },
            SharedSegment { size_bytes: 2 << 20, chunks: vec![0..2 << 20] },
        ],
        allocations: vec![
            allocation(0, 0, 4 << 20, Some("weight")),
            allocation(0, 6 << 20, 1, Some("")),
            allocation(1, 512, 100, None),
        ],
    }
}

#[test]
fn a_layout_survives_a_round_trip() {
    assert_eq!(Layout::read(&layout().write(), GRANULARITY), Ok(layout()));
    assert_eq!(layout().chunks().count(), 4);
}

#[test]
fn layouts_that_no_pool_has_are_refused() {
    let refused = |change: fn(&mut Layout)| {
        let mut changed = layout();
        change(&mut changed);
        Layout::read(&changed.write(), GRANULARITY).expect_err("an invalid layout")
    };
    let layout = MessageError::Layout;
    assert_eq!(refused(|of| of.segments[0].chunks[1] = 1 << 20..4 << 20), layout("chunks"));
    assert_eq!(refused(|of| of.segments[0].chunks.swap(0, 1)), layout("chunks"));
    assert_eq!(refused(|of| of.segments[0].chunks[2] = 6 << 20..6 << 20), layout("chunks"));
    assert_eq!(refused(|of| of.segments[0].size_bytes += 2 << 20), layout("segments"));
    assert_eq!(refused(|of| of.segments[1].chunks.clear()), layout("segments"));
    assert_eq!(
        refused(|of| of.segments[1] = SharedSegment { size_bytes: 1 << 60, chunks: vec![0..1 << 60] }),
        layout("segments")
    );
    assert_eq!(refused(|of| of.allocations[0].segment = 2), layout("allocations"));
    assert_eq!(
        refused(|of| of.allocations[0].offset_bytes = 1),
        layout("allocations"),
        "the allocation overlaps a gap"
    );
    assert_eq!(refused(|of| of.allocations[0].offset_bytes = u64::MAX - 5), layout("allocations"));
    assert_eq!(refused(|of| of.allocations[2].size_bytes = 0), layout("allocations"));
    assert_eq!(refused(|of| of.allocations[1].name = Some("x".repeat(5000).into())), layout("names"));
}

#[test]
fn torn_and_changed_layouts_are_errors_or_other_layouts_and_never_panics() {
    let body = layout().write();
    for length in 0..body.len() {
        assert!(Layout::read(&body[..length], GRANULARITY).is_err(), "{length} bytes");
    }
    assert_eq!(Layout::read(&[&body[..], &[0]].concat(), GRANULARITY), Err(MessageError::Length));
    for at in 0..body.len() {
        for value in [0, 1, 0x7f, 0x80, 0xff] {
            let mut changed = body.clone();
            changed[at] = value;
            if let Ok(read) = Layout::read(&changed, GRANULARITY) {
                assert_eq!(read.write(), changed, "byte {at}");
            }
            let header = Header::new(OFFER, 2, &body);
            assert_eq!(header.check(&changed).is_err(), changed != body);
        }
    }
    // A count that exceeds the received bytes allocates no memory.
    let huge = [&body[..28], &u32::MAX.to_le_bytes()].concat();
    assert_eq!(Layout::read(&huge, GRANULARITY), Err(MessageError::Length));
}

#[test]
fn small_messages_survive_a_round_trip() {
    let hello = Hello { version: 7, access: Access::ReadWrite, pid: 9, uuid: *b"0123456789abcdef" };
    assert_eq!(Hello::read(hello.write()), Ok(hello));
    for step in [Step::Next { first: 64, count: 3 }, Step::Attached, Step::GaveUp { code: -2 }] {
        assert_eq!(Step::read(step.write()), Ok(step));
    }
    for refusal in [
        Refusal::Version,
        Refusal::Device { uuid: [7; 16] },
        Refusal::Access { given: Access::Read },
        Refusal::Stale { word: 0x1002 },
        Refusal::Failed { code: 700 },
    ] {
        assert_eq!(Refusal::read(&refusal.write()), Ok(refusal));
    }
    let header = Header::new(BATCH_OF_HANDLES, 64, b"body");
    assert_eq!(Header::read(header.write()), Ok(header));
    let mut long = header.write();
    long[20..24].copy_from_slice(&u32::MAX.to_le_bytes());
    assert!(matches!(Header::read(long), Err(MessageError::TooLong { .. })));
    assert_eq!(Header::read([0; Header::BYTES]), Err(MessageError::Foreign));
    assert_eq!(Hello::read([0; Hello::BYTES]), Err(MessageError::Foreign));
    assert_eq!(Step::read([9; Step::BYTES]), Err(MessageError::Unexpected { kind: 0x0909_0909 }));
}

#[test]
fn a_long_name_is_truncated_at_a_character_boundary() {
    assert_eq!(short("weight"), "weight");
    assert_eq!(short(&"ä".repeat(3000)).len(), NAME_BYTES_MAX);
    assert_eq!(short(&format!("x{}", "ä".repeat(3000))).len(), NAME_BYTES_MAX - 1);
}

#[test]
fn messages_have_the_documented_layout() {
    assert_eq!([Hello::BYTES, Header::BYTES, Step::BYTES], [36, 32, 12]);
    let hello = Hello { version: 7, access: Access::ReadWrite, pid: 0x0102, uuid: *b"0123456789abcdef" };
    assert_eq!(hello.write(), *b"symshare\x07\0\0\0\x02\0\0\0\x02\x01\0\x000123456789abcdef");
    let header = Header { version: 1, kind: 2, handles: 3, length: 4, checksum: 5 };
    assert_eq!(header.write(), *b"symshare\x01\0\0\0\x02\0\0\0\x03\0\0\0\x04\0\0\0\x05\0\0\0\0\0\0\0");
    assert_eq!(Step::Next { first: 2, count: 3 }.write(), [1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0]);
    let refusal = Refusal::Access { given: Access::Read }.write();
    assert_eq!((refusal.len(), &refusal[..12]), (28, &[3, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0][..]));
    let small =
        Layout { segments: layout().segments.split_off(1), allocations: layout().allocations.split_off(3), ..layout() };
    let expected = [
        &[17, 0, 0, 0, 3, 0, 0, 0][..],
        &[9, 0, 0, 0, 0, 0, 0, 0, 0x34, 0x12, 0, 0, 0, 0, 0, 0],
        &[1, 0, 0, 0, 1, 0, 0, 0],
        &[0, 0, 0x20, 0, 0, 0, 0, 0, 1, 0, 0, 0],
        &[0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x20, 0, 0, 0, 0, 0],
        &[0, 0, 0, 0],
    ];
    assert_eq!(small.write(), expected.concat());
}

#[test]
fn fabric_handles_must_fill_the_body() {
    let body = [[1; FABRIC_BYTES], [2; FABRIC_BYTES]].concat();
    assert_eq!(fabric_handles(&body, 2), Ok(vec![[1; FABRIC_BYTES], [2; FABRIC_BYTES]]));
    assert_eq!(fabric_handles(&body, 1), Err(MessageError::Length));
    assert_eq!(fabric_handles(&body[1..], 2), Err(MessageError::Length));
}
