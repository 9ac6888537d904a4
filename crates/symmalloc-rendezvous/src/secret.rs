//! The secret of a job. Its ranks prove to each other that they know it.

use crate::error::RendezvousError;
use hmac::{Hmac, Mac};
use rustix::rand::{GetRandomFlags, getrandom};
use sha2::Sha256;
use std::ffi::OsString;
use std::fmt;
use std::io;
use std::os::unix::ffi::OsStringExt;

/// The environment variable with the secret, which must be the same on every rank.
pub(crate) const SECRET_VARIABLE: &str = "SYMMALLOC_JOB_SECRET";

/// Minimum length in bytes. A process that poses as rank 0 receives a proof and can test guesses against it offline.
const SECRET_BYTES_MIN: usize = 16;

/// Length of a proof in bytes.
pub(crate) const PROOF_BYTES: usize = 32;

/// Length in bytes of the random numbers that make a proof valid for one exchange only.
pub(crate) const NONCE_BYTES: usize = 32;

/// Length in bytes of the token that rank 0 creates for one meeting and publishes in the store.
pub(crate) const TOKEN_BYTES: usize = 32;

/// The secret of a job, or a key that contains it. Neither its `Debug` output nor any error or event contains it.
#[derive(Clone)]
pub(crate) struct Secret(Vec<u8>);

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

/// The purpose of a proof. A proof for one purpose is invalid for another.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Purpose {
    /// A rank proves that it knows the secret.
    RankToRank0,
    /// Rank 0 proves that it knows the secret and that the answer is its own.
    Rank0ToRank,
    /// The name of a socket that others cannot guess.
    SocketName,
}

impl Purpose {
    fn label(self) -> &'static [u8; 16] {
        match self {
            Purpose::RankToRank0 => b"symmalloc rank>0",
            Purpose::Rank0ToRank => b"symmalloc 0>rank",
            Purpose::SocketName => b"symmalloc socket",
        }
    }
}

impl Secret {
    /// Reads the secret from the environment, if it is set.
    ///
    /// # Errors
    /// Returns an error if the secret is too short.
    pub(crate) fn from_env() -> Result<Option<Self>, RendezvousError> {
        std::env::var_os(SECRET_VARIABLE).filter(|value| !value.is_empty()).map(Secret::new).transpose()
    }

    pub(crate) fn new(value: OsString) -> Result<Self, RendezvousError> {
        let bytes = value.into_vec();
        if bytes.len() < SECRET_BYTES_MIN {
            return Err(RendezvousError::ShortSecret { bytes: bytes.len(), bytes_min: SECRET_BYTES_MIN });
        }
        Ok(Secret(bytes))
    }

    /// Returns the key that consists of a token and of the secret, if there is one.
    pub(crate) fn with_token(token: &[u8; TOKEN_BYTES], secret: Option<&Secret>) -> Self {
        Secret([&token[..], secret.map_or(&[][..], |secret| &secret.0)].concat())
    }

    /// Returns the proof for parts of fixed lengths.
    pub(crate) fn prove(&self, purpose: Purpose, parts: &[&[u8]]) -> [u8; PROOF_BYTES] {
        self.code(purpose, parts).finalize().into_bytes().into()
    }

    /// Returns `true` if `proof` is the proof for these parts. The time does not depend on which bytes are wrong.
    pub(crate) fn is_proof(&self, proof: &[u8], purpose: Purpose, parts: &[&[u8]]) -> bool {
        self.code(purpose, parts).verify_slice(proof).is_ok()
    }

    fn code(&self, purpose: Purpose, parts: &[&[u8]]) -> Hmac<Sha256> {
        let mut code = Hmac::<Sha256>::new_from_slice(&self.0).expect("a key may have any length");
        code.update(purpose.label());
        parts.iter().for_each(|part| code.update(part));
        code
    }
}

/// Returns unpredictable bytes.
pub(crate) fn random<const BYTES: usize>() -> Result<[u8; BYTES], RendezvousError> {
    let mut bytes = [0; BYTES];
    loop {
        match getrandom(&mut bytes, GetRandomFlags::empty()) {
            // The system returns up to 256 bytes at once.
            Ok(count) if count == BYTES => return Ok(bytes),
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(RendezvousError::Random { kind: io::Error::from(error).kind() }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn secret(text: &str) -> Secret {
        Secret::new(text.into()).expect("the secret is long enough")
    }

    #[test]
    fn a_proof_is_valid_for_its_secret_purpose_and_parts_only() {
        let (ours, other) = (secret("0123456789abcdef"), secret("0123456789abcdeg"));
        let proof = ours.prove(Purpose::RankToRank0, &[b"a", b"b"]);
        assert!(ours.is_proof(&proof, Purpose::RankToRank0, &[b"a", b"b"]));
        assert!(!other.is_proof(&proof, Purpose::RankToRank0, &[b"a", b"b"]));
        assert!(!ours.is_proof(&proof, Purpose::Rank0ToRank, &[b"a", b"b"]));
        assert!(!ours.is_proof(&proof, Purpose::RankToRank0, &[b"a", b"c"]));
        assert!(!ours.is_proof(&proof[..31], Purpose::RankToRank0, &[b"a", b"b"]));
        assert!(!ours.is_proof(&[0; PROOF_BYTES], Purpose::RankToRank0, &[b"a", b"b"]));
    }

    #[test]
    fn a_secret_is_never_printed() {
        let text = format!("{:?}", secret("hunter2hunter2hunter2"));
        assert_eq!(text, "Secret(..)");
        let short = Secret::new("hunter2".into()).expect_err("too short");
        assert_eq!(short, RendezvousError::ShortSecret { bytes: 7, bytes_min: 16 });
        assert!(!format!("{short} {short:?}").contains("hunter2"));
    }

    #[test]
    fn random_bytes_differ() {
        assert_ne!(
            random::<32>().expect("random numbers are available"),
            random::<32>().expect("random numbers are available")
        );
    }
}
