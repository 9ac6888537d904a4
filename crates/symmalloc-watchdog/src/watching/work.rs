//! Work that a rank submits to a communicator. Recording it allocates no memory.

use crate::flight_record::Signature;
use std::borrow::Cow;

/// Work submitted to a communicator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Work {
    /// A collective of NCCL, or a send or receive.
    Call(Call),
    /// Another operation that every rank performs: a registration, a split, or work that the program announced.
    Named {
        /// Its name.
        kind: Cow<'static, str>,
        /// Number of elements, if it has any.
        elements: Option<u64>,
    },
    /// The destruction of the communicator. It has the number of the next collective but does not count as one, because another rank may
    /// still submit that collective.
    Destruction,
}

/// The arguments of an NCCL call that reports contain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Call {
    /// The name of the call, such as "ncclAllReduce".
    pub symbol: &'static str,
    /// Number of elements.
    pub count: u64,
    /// The type of the elements, such as "float32".
    pub data_type: &'static str,
    /// The reduction, such as "sum".
    pub reduction: Option<&'static str>,
    /// The single rank that the call names.
    pub rank: Option<NamedRank>,
}

/// The single rank that a call names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NamedRank {
    /// The root of a collective.
    Root(u32),
    /// The receiver of a send.
    To(u32),
    /// The sender of a receive.
    From(u32),
}

impl Work {
    /// Returns `true` if every rank submits the entry.
    pub(super) fn is_collective(&self) -> bool {
        self.peer().is_none()
    }

    /// Returns the other rank of a send or receive.
    pub(super) fn peer(&self) -> Option<u32> {
        match self {
            Work::Call(Call { rank: Some(NamedRank::To(peer) | NamedRank::From(peer)), .. }) => Some(*peer),
            _ => None,
        }
    }

    pub(super) fn signature(&self) -> Signature {
        match self {
            Work::Call(call) => Signature {
                kind: call.symbol.to_owned(),
                elements: Some(call.count),
                data_type: Some(call.data_type.to_owned()),
                detail: call.detail(),
            },
            Work::Named { kind, elements } => {
                Signature { kind: kind.clone().into_owned(), elements: *elements, data_type: None, detail: None }
            }
            Work::Destruction => {
                let kind = "ncclCommFinalize".to_owned();
                Signature { kind, elements: None, data_type: None, detail: None }
            }
        }
    }
}

impl Call {
    /// Returns the reduction, root or peer of the call, for reports.
    fn detail(&self) -> Option<String> {
        let rank = self.rank.map(|rank| match rank {
            NamedRank::Root(rank) => format!("root {rank}"),
            NamedRank::To(rank) => format!("to {rank}"),
            NamedRank::From(rank) => format!("from {rank}"),
        });
        match (self.reduction, rank) {
            (Some(reduction), Some(rank)) => Some(format!("{reduction}, {rank}")),
            (Some(reduction), None) => Some(reduction.to_owned()),
            (None, rank) => rank,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signature_has_the_reduction_and_the_named_rank() {
        let text = |reduction, rank| {
            let call = Call { symbol: "ncclCall", count: 8, data_type: "float32", reduction, rank };
            Work::Call(call).signature().to_string()
        };
        assert_eq!(text(None, None), "ncclCall of 8 float32");
        assert_eq!(text(Some("sum"), None), "ncclCall of 8 float32 sum");
        assert_eq!(text(Some("sum"), Some(NamedRank::Root(3))), "ncclCall of 8 float32 sum, root 3");
        assert_eq!(text(None, Some(NamedRank::Root(3))), "ncclCall of 8 float32 root 3");
        assert_eq!(text(None, Some(NamedRank::To(1))), "ncclCall of 8 float32 to 1");
        assert_eq!(text(None, Some(NamedRank::From(1))), "ncclCall of 8 float32 from 1");
    }
}
