//! Tests of `src/history/journal.rs`, which has them as its module.

use super::*;
use crate::history::digest::op_word;
use crate::types::ids::StreamId;

fn journal(history_ops: u32) -> (Journal, Digest) {
    let digest = Digest { ops: 0, value: 7 };
    (Journal::new(history_ops, digest, Arc::new(ProgramOrder::new(true))), digest)
}

/// Folds and notes an op.
fn note(journal: &mut Journal, digest: &mut Digest, op: u64) {
    digest.fold(op, 1);
    journal.note(op, 1, *digest);
}

#[test]
fn a_journal_answers_for_its_last_ops_as_one_that_forgets_nothing() {
    let (mut short, mut digest) = journal(10);
    let mut all = vec![digest];
    for op in 0..1000 {
        note(&mut short, &mut digest, op);
        all.push(digest);
        let oldest = (op + 1).saturating_sub(10);
        assert_eq!((short.ops(), short.oldest()), (op + 1, oldest));
        for (at, digest) in (0..).zip(&all) {
            let known = (at >= oldest).then_some(digest.value);
            assert_eq!(short.digest_at(at), known);
            assert_eq!(short.entry(at).map(|entry| entry.op), (at >= oldest && at <= op).then_some(at));
        }
        assert!(short.checkpoints().all(|checkpoint| all[checkpoint.ops as usize] == checkpoint));
    }
}

#[test]
fn checkpoints_are_few_spread_and_at_the_same_ops_whatever_a_rank_remembers() {
    let (mut one, mut digest) = journal(16);
    let (mut other, mut other_digest) = journal(100);
    for op in 0..100_000 {
        note(&mut one, &mut digest, op);
        note(&mut other, &mut other_digest, op);
    }
    let kept: Vec<Digest> = one.checkpoints().collect();
    assert!(kept.len() <= CHECKPOINTS_MAX + 2, "{}", kept.len());
    assert_eq!(kept[0].ops, 0, "where ranks agreed is never thinned out");
    let widest = kept.windows(2).map(|pair| pair[1].ops - pair[0].ops).max().expect("several");
    assert!(widest <= 2 * 100_000 / (CHECKPOINTS_MAX as u64 / 2), "{widest}");
    let shared = other.checkpoints().filter(|checkpoint| kept.contains(checkpoint)).count();
    assert!(shared >= CHECKPOINTS_MAX / 2, "{shared}");
}

#[test]
fn an_agreement_empties_the_journal_and_its_memory_is_bounded() {
    let (mut journal, mut digest) = journal(500);
    let name = "ü".repeat(100);
    for op in 0..3000 {
        note(&mut journal, &mut digest, op_word(Mark::Allocate, StreamId(0), op));
        journal.name_allocation(1, &name);
    }
    assert!(journal.name_of(2999).is_some_and(|kept| kept.len() == 64 && name.starts_with(kept)));
    assert!(journal.bytes() <= 500 * (32 + 112) + 16 * 64, "{}", journal.bytes());
    journal.agree(digest);
    assert_eq!((journal.oldest(), journal.ops()), (3000, 3000));
    assert_eq!(journal.checkpoints().collect::<Vec<_>>(), [digest]);
    assert_eq!(journal.name_of(2999), None);
    journal.close();
    assert!(journal.bytes() <= 16 * 64, "{}", journal.bytes());
}
