//! Requests that arrive while others are being answered.

use super::model::{POSITIONS, Random, VOCABULARY};

/// One request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Request {
    /// The decoding step at which the request arrives.
    pub(crate) arrival: u64,
    /// The prompt, of at least one token.
    pub(crate) prompt: Vec<u32>,
    /// Maximum number of tokens of the answer.
    pub(crate) answer_max: usize,
}

impl Request {
    /// Generates `count` requests in order of arrival: short and long ones, in bursts and lulls.
    pub(crate) fn generate(seed: u64, count: usize) -> Vec<Request> {
        let random = &mut Random(seed);
        let mut arrival = 0;
        let request = |_| {
            if random.between(0, 4) == 0 {
                arrival += random.between(0, 12) as u64;
            }
            let prompt = (0..random.between(1, 128)).map(|_| random.between(1, VOCABULARY) as u32).collect();
            Request { arrival, prompt, answer_max: random.between(4, POSITIONS - 128) }
        };
        (0..count).map(request).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_fit_and_are_equal_in_every_run() {
        let requests = Request::generate(1, 500);
        assert_eq!(requests, Request::generate(1, 500));
        assert!(requests.is_sorted_by_key(|request| request.arrival));
        assert!(requests.iter().all(|request| request.prompt.len() + request.answer_max <= POSITIONS));
        assert!(requests.iter().all(|request| !request.prompt.is_empty() && request.answer_max > 0));
    }
}
