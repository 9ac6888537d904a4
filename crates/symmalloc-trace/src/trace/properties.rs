//! Property tests: round trips of arbitrary traces, and reading of arbitrary text.

use std::collections::BTreeSet;
use std::num::NonZeroU64;

use proptest::prelude::*;

use super::*;
use symmalloc_core::config::{Config, PoolConfig};
use symmalloc_core::ids::{AllocationId, Placement, PoolId, SegmentId, StreamId};
use symmalloc_core::op::{Contents, Op, Pending, Record};

/// A generator step: the kind of op, and raw numbers that select its operands.
type Step = (u8, u64, u64, Option<(String, u64)>);

/// Returns consistent records for arbitrary steps: the operands of each step are chosen from those that exist.
fn consistent_records(steps: Vec<Step>) -> Vec<Record> {
    let mut records = vec![Op::register(StreamId(0)).into()];
    let (mut streams, mut pools, mut next_pool) = (1_u16, vec![PoolId::DEFAULT], 1);
    let (mut given, mut live) = (BTreeSet::new(), Vec::new());
    let mut open_steps: Vec<PoolId> = Vec::new();
    let mut firsts = vec![StreamId(0)];
    for (what, a, b, named) in steps {
        let stream = StreamId((a % u64::from(streams)) as u16);
        let pool = pools[(b % pools.len() as u64) as usize];
        let chosen = (!live.is_empty()).then(|| (a % live.len().max(1) as u64) as usize);
        let op = match (what, chosen) {
            (0, _) => {
                streams += 1;
                let stream = StreamId(streams - 1);
                if a % 3 > 0 {
                    firsts.push(stream);
                }
                let group = if a % 3 > 0 { stream } else { firsts[(b % firsts.len() as u64) as usize] };
                Op::RegisterStream { stream, group }
            }
            (1, _) => {
                pools.push(PoolId(next_pool));
                next_pool += 1;
                let config = PoolConfig::builder()
                    .symmetric(a % 2 == 0)
                    .limit_bytes(Some(b))
                    .build()
                    .expect("every value should be in its range");
                Op::CreatePool { pool: PoolId(next_pool - 1), config: Box::new(config) }
            }
            (2, _) if pools.len() > 1 => {
                let pool = pools.remove(1);
                open_steps.retain(|open| *open != pool);
                Op::DestroyPool { pool }
            }
            (3, _) => Op::Wait { stream, on: StreamId(0) },
            (4, _) => Op::Synchronize { stream },
            (5, _) => Op::Reserve { pool, stream, size_bytes: b },
            (6, _) if a % 5 == 0 && !open_steps.contains(&pool) => {
                Op::Sleep { pool, contents: Contents::ALL[b as usize % 3] }
            }
            (6, _) if a % 5 == 1 => Op::Wake { pool },
            (6, _) if a % 5 == 2 => Op::Stay { pool, asked: Contents::ALL.get(b as usize % 4).copied() },
            (6, _) => Op::Trim { pool: (a % 2 == 0).then_some(pool) },
            (7, _) if a % 3 == 0 => match open_steps.iter().position(|open| *open == pool) {
                None => {
                    open_steps.push(pool);
                    Op::BeginStep { pool, key: b }
                }
                Some(at) => Op::EndStep { pool: open_steps.remove(at) },
            },
            (7, _) if a % 3 == 1 => Op::ResetPool { pool },
            (7, _) => Op::Sync,
            (8..=9, Some(chosen)) => {
                let free = Op::Free { id: live.swap_remove(chosen) };
                let mut record = Record::from(free);
                record.pending = Pending::new((b % 4).wrapping_mul(b));
                records.push(record);
                continue;
            }
            (10, Some(chosen)) => Op::RecordUse { id: live[chosen], stream: StreamId((b % u64::from(streams)) as u16) },
            _ => {
                let mut id = if a % 3 == 0 { b } else { given.len() as u64 };
                while !given.insert(id) {
                    id = id.wrapping_add(1);
                }
                live.push(AllocationId(id));
                let mut record = Record::from(Op::Allocate { id: AllocationId(id), pool, stream, size_bytes: b });
                if let Some((name, offset_bytes)) = named {
                    record = record.with_name(&name);
                    record = record.with_placement(Placement { segment: SegmentId(a as u32), offset_bytes });
                    record.revived_bytes =
                        NonZeroU64::new(b.saturating_add(offset_bytes)).filter(|_| a % 4 == 0 && b > 0);
                }
                records.push(record);
                continue;
            }
        };
        records.push(op.into());
    }
    records
}

/// Generates almost valid lines. They reach deeper code than random characters do.
fn nearly_a_trace() -> impl Strategy<Value = String> {
    let field = prop_oneof![
        "[a-z]{1,11}",
        "s[0-3]",
        "p[0-3]",
        "[0-9]{1,3}",
        "[0-9]{1,22}",
        "->",
        "[0-9]@[0-9]",
        "\"[^\n]{0,6}\"?",
        "#",
        "segments:fixed",
        Just("a".into()),
        Just("f".into()),
        Just("pending".into()),
        Just("revived".into()),
        Just("u".into()),
        Just("pool".into()),
        Just("stream".into()),
        Just("end".into()),
        Just("wait".into()),
        Just("reserve".into()),
        Just("config".into()),
        Just("trim".into()),
        Just("destroy".into()),
        Just("reset".into()),
    ];
    let line = prop::collection::vec(field, 0..6).prop_map(|fields| fields.join(" "));
    prop::collection::vec(line, 0..12).prop_map(|lines| format!("symmalloc-trace 1\n{}", lines.join("\n")))
}

proptest! {
    #[test]
    fn consistent_records_come_back_from_text(
        steps in prop::collection::vec(
            (0..20_u8, any::<u64>(), any::<u64>(), prop::option::weighted(0.3, (any::<String>(), any::<u64>()))),
            0..60,
        ),
        with_config in any::<bool>(),
    ) {
        let config = with_config.then(Config::default);
        let trace = Trace::new(config, consistent_records(steps)).expect("the records should be consistent");
        let text = trace.to_text();
        prop_assert_eq!(&Trace::parse(&text).expect("a written trace can be read"), &trace);
        let mut writer = TraceWriter::new(Vec::new(), trace.config()).expect("writing to a vector cannot fail");
        for record in trace.records() {
            writer.write(record).expect("the records should be consistent");
        }
        prop_assert_eq!(writer.finish().expect("writing to a vector cannot fail"), text.into_bytes());
    }

    #[test]
    fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        prop_assert!(Trace::read(&bytes[..]).is_err(), "random bytes must not form a trace");
    }

    /// Any text that the reader accepts is consistent and survives a round trip.
    #[test]
    fn almost_valid_text_never_panics(text in nearly_a_trace()) {
        let reader = TraceReader::new(text.as_bytes());
        if let Ok(mut reader) = reader {
            let mut records = Vec::new();
            let mut errors = 0;
            for record in reader.by_ref() {
                match record {
                    Ok(record) => records.push(record),
                    Err(_) => errors += 1,
                }
            }
            prop_assert!(errors <= 1);
            prop_assert_eq!(reader.records(), records.len() as u64);
            let trace = Trace::new(reader.config().cloned(), records).expect("the records read are consistent");
            prop_assert_eq!(&Trace::parse(&trace.to_text()).expect("a written trace can be read"), &trace);
        }
    }
}
