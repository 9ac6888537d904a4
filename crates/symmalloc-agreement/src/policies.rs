//! The comparison of configurations, which finds the keys whose values differ.

use super::message::{POLICIES_PER_PAGE, PolicyPage, PolicyText, messages};
use super::outcome::Next;
use super::protocol::ProtocolError;
use super::question::Ask;
use super::ranks::RankSet;
use super::report::{Difference, PolicyDifference};
use super::transport::Gathered;
use std::borrow::Cow;
use std::collections::{BTreeMap, VecDeque};
use symmalloc_core::units::MIB;

/// Maximum number of configurations whose texts are compared and reported.
const POLICIES_REPORTED: usize = 8;

#[derive(Debug, Default)]
pub(crate) struct Policies {
    /// Numbers of the configurations that differ, but whose texts have not been compared yet.
    differing: VecDeque<u32>,
    found: Vec<PolicyDifference>,
}

impl Policies {
    /// Compares one page of digests, starting with configuration number `first`.
    pub(crate) fn page(&mut self, first: u32, gathered: &Gathered) -> Result<Next, ProtocolError> {
        let mut digests: Vec<Option<u64>> = Vec::new();
        let mut differs = [false; POLICIES_PER_PAGE];
        let mut is_last = true;
        for page in messages::<PolicyPage>(gathered) {
            let (rank, page) = page?;
            let page = page.entries(rank)?;
            is_last &= page.len() < POLICIES_PER_PAGE;
            let page = (0..POLICIES_PER_PAGE).map(|index| page.get(index).map(|digest| digest.get()));
            if rank == 0 {
                digests.extend(page);
            } else {
                page.enumerate().for_each(|(index, digest)| differs[index] |= digest != digests[index]);
            }
        }
        self.differing.extend((first..).zip(differs).filter(|(_, differs)| *differs).map(|(number, _)| number));
        if self.differing.is_empty() && is_last {
            return Err(ProtocolError::Contradiction);
        }
        if self.differing.is_empty() {
            let first = first.checked_add(POLICIES_PER_PAGE as u32).ok_or(ProtocolError::Contradiction)?;
            return Ok(Next::Ask(Ask::Policies { first }));
        }
        self.differing.truncate(POLICIES_REPORTED);
        Ok(self.next())
    }

    /// Compares the texts of one configuration.
    pub(crate) fn texts(&mut self, number: u32, gathered: &Gathered) -> Result<Next, ProtocolError> {
        let mut texts: BTreeMap<Option<String>, RankSet> = BTreeMap::new();
        for message in messages::<PolicyText>(gathered) {
            let (rank, message) = message?;
            texts.entry(message.decode(rank)?.map(Cow::into_owned)).or_default().push(rank);
        }
        if texts.len() < 2 {
            return Err(ProtocolError::Contradiction);
        }
        self.found.extend(differences(number.checked_sub(1), &texts));
        Ok(self.next())
    }

    fn next(&mut self) -> Next {
        match self.differing.pop_front() {
            Some(number) => Next::Ask(Ask::Policy { number }),
            None => Next::Disagreed(Difference::Configuration(std::mem::take(&mut self.found))),
        }
    }
}

/// Returns the keys whose values differ between ranks.
fn differences(pool: Option<u32>, texts: &BTreeMap<Option<String>, RankSet>) -> Vec<PolicyDifference> {
    if texts.contains_key(&None) {
        let value = |text: &Option<String>| text.as_ref().map(|_| "created".into());
        return vec![difference(pool, "pool", texts.iter().map(|(text, ranks)| (value(text), ranks)))];
    }
    let policies: Vec<(Vec<(String, String)>, &RankSet)> =
        texts.iter().map(|(text, ranks)| (keys(text.as_deref().unwrap_or_default()), ranks)).collect();
    let mut names: Vec<&str> = Vec::new();
    for (name, _) in policies.iter().flat_map(|(keys, _)| keys) {
        if !names.contains(&name.as_str()) {
            names.push(name);
        }
    }
    let by_name = names.into_iter().map(|name| {
        let value = |keys: &[(String, String)]| {
            keys.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str().into())
        };
        difference(pool, name, policies.iter().map(|(keys, ranks)| (value(keys), *ranks)))
    });
    by_name.filter(|difference| difference.values.len() > 1).collect()
}

/// Groups the ranks by the value of one key.
fn difference<'a>(
    pool: Option<u32>,
    key: &str,
    values: impl Iterator<Item = (Option<Box<str>>, &'a RankSet)>,
) -> PolicyDifference {
    let mut ranks_by_value: BTreeMap<Option<Box<str>>, Vec<u32>> = BTreeMap::new();
    values.for_each(|(value, ranks)| ranks_by_value.entry(value).or_default().extend(ranks.iter()));
    let mut values: Vec<(RankSet, Option<Box<str>>)> =
        ranks_by_value.into_iter().map(|(value, ranks)| (ranks.into_iter().collect(), value)).collect();
    values.sort_by_key(|(ranks, _)| ranks.first());
    PolicyDifference { pool, key: key.into(), values }
}

/// Splits a canonical configuration text into keys and values, with sizes in bytes.
fn keys(text: &str) -> Vec<(String, String)> {
    let mut depth = 0;
    let pairs = text.split(|letter| {
        depth += i32::from(letter == '[') - i32::from(letter == ']');
        letter == ',' && depth == 0
    });
    let in_bytes = |(key, value): (&str, &str)| match (key.strip_suffix("_mb"), value.parse::<u64>()) {
        (Some(name), Ok(mebibytes)) => (format!("{name}_bytes"), mebibytes.saturating_mul(MIB).to_string()),
        _ => (key.to_owned(), value.to_owned()),
    };
    pairs.map(|pair| in_bytes(pair.split_once(':').unwrap_or((pair, "")))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::{MESSAGE_BYTES, append};

    #[test]
    fn a_list_of_divisions_is_one_value_and_sizes_are_converted_to_bytes() {
        let keys = keys("segments:fixed,limit_mb:2,roundup_power2_divisions:[256:1,512:2,>:8],reclaim:heap");
        let values: Vec<&str> = keys.iter().map(|(_, value)| value.as_str()).collect();
        assert_eq!(values, ["fixed", "2097152", "[256:1,512:2,>:8]", "heap"]);
        assert_eq!(keys[1].0, "limit_bytes");
    }

    #[test]
    fn a_report_shows_the_texts_of_ranks_on_one_line_without_hidden_characters() {
        let hostile = [
            "\u{1b}[31m",
            "\u{1b}]0;title\u{7}",
            "\r",
            "\n  rank 0: the same",
            "\u{9b}2J",
            "\u{202e}",
            "\u{200b}",
            "\u{2028}",
        ];
        for text in hostile.into_iter().flat_map(|text| [format!("reclaim:{text}"), format!("{text}:heap")]) {
            let texts = [PolicyText::new(Some("reclaim:heap")), PolicyText::new(Some(&text))];
            let mut gathered = Vec::new();
            texts.iter().for_each(|text| append(&mut gathered, text, MESSAGE_BYTES));
            let outcome = Policies::default().texts(1, &Gathered::new(gathered, MESSAGE_BYTES));
            let Ok(Next::Disagreed(Difference::Configuration(found))) = outcome else {
                panic!("they differ in {text:?}")
            };
            for difference in found {
                let report = difference.to_string();
                assert!(!report.contains(|c: char| c == '\n' || symmalloc_text::is_hidden(c)), "{report:?}");
            }
        }
    }

    #[test]
    fn only_keys_that_differ_are_reported() {
        let texts = [("streams:shared,limit_mb:1", [0, 2]), ("streams:shared,limit_bytes:5", [1, 3])];
        let texts = texts.map(|(text, ranks)| (Some(text.to_owned()), ranks.into_iter().collect()));
        let found = differences(Some(4), &texts.into_iter().collect());
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].to_string(), "symmetric pool 4, limit_bytes: 1048576 on ranks 0,2; 5 on ranks 1,3");
    }
}
