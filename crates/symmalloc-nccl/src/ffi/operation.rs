//! Collectives in the form that NCCL takes: the call, the type of the elements, the reduction, addresses, and numbers of elements.

use crate::ffi::handles::StreamHandle;
use cudarc::driver::DeviceRepr;
use std::ffi::c_int;
use std::fmt;

/// A collective operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
#[repr(u64)]
pub enum Collective {
    /// [`Communicator::all_reduce`](crate::Communicator::all_reduce) and its in-place variant
    AllReduce = 1,
    /// [`Communicator::all_gather`](crate::Communicator::all_gather)
    AllGather = 2,
    /// [`Communicator::reduce_scatter`](crate::Communicator::reduce_scatter)
    ReduceScatter = 3,
    /// [`Communicator::broadcast`](crate::Communicator::broadcast)
    Broadcast = 4,
    /// [`Communicator::reduce`](crate::Communicator::reduce)
    Reduce = 5,
}

impl Collective {
    /// All variants.
    pub(crate) const ALL: [Collective; 5] = [
        Collective::AllReduce,
        Collective::AllGather,
        Collective::ReduceScatter,
        Collective::Broadcast,
        Collective::Reduce,
    ];
}

impl fmt::Display for Collective {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Collective::AllReduce => "all-reduce",
            Collective::AllGather => "all-gather",
            Collective::ReduceScatter => "reduce-scatter",
            Collective::Broadcast => "broadcast",
            Collective::Reduce => "reduce",
        })
    }
}

/// A collective with its reduction and root, or a send or receive with its peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NcclCall {
    AllReduce { op: ReduceOp },
    AllGather,
    ReduceScatter { op: ReduceOp },
    Broadcast { root: u32 },
    Reduce { op: ReduceOp, root: u32 },
    Send { peer: u32 },
    Receive { peer: u32 },
}

impl NcclCall {
    /// Returns the collective, or `None` for a send or receive.
    pub(crate) fn collective(self) -> Option<Collective> {
        match self {
            NcclCall::AllReduce { .. } => Some(Collective::AllReduce),
            NcclCall::AllGather => Some(Collective::AllGather),
            NcclCall::ReduceScatter { .. } => Some(Collective::ReduceScatter),
            NcclCall::Broadcast { .. } => Some(Collective::Broadcast),
            NcclCall::Reduce { .. } => Some(Collective::Reduce),
            NcclCall::Send { .. } | NcclCall::Receive { .. } => None,
        }
    }

    /// Returns the name of NCCL's function.
    pub(crate) fn symbol(self) -> &'static str {
        match self {
            NcclCall::AllReduce { .. } => "ncclAllReduce",
            NcclCall::AllGather => "ncclAllGather",
            NcclCall::ReduceScatter { .. } => "ncclReduceScatter",
            NcclCall::Broadcast { .. } => "ncclBroadcast",
            NcclCall::Reduce { .. } => "ncclReduce",
            NcclCall::Send { .. } => "ncclSend",
            NcclCall::Receive { .. } => "ncclRecv",
        }
    }

    /// Returns the root or the peer that the call names, if any.
    pub(crate) fn named_rank(self) -> Option<u32> {
        match self {
            NcclCall::Broadcast { root: rank } | NcclCall::Reduce { root: rank, .. } => Some(rank),
            NcclCall::Send { peer: rank } | NcclCall::Receive { peer: rank } => Some(rank),
            NcclCall::AllReduce { .. } | NcclCall::AllGather | NcclCall::ReduceScatter { .. } => None,
        }
    }

    /// Returns the reduction of the call, if it has one.
    pub(crate) fn reduction(self) -> Option<ReduceOp> {
        match self {
            NcclCall::AllReduce { op } | NcclCall::ReduceScatter { op } | NcclCall::Reduce { op, .. } => Some(op),
            _ => None,
        }
    }
}

/// A call with its memory and stream, in the form that NCCL takes: addresses and numbers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Operation {
    pub(crate) call: NcclCall,
    /// Address of this rank's elements; unused by a receive.
    pub(crate) send: u64,
    /// Address of the result; unused by a send.
    pub(crate) receive: u64,
    /// Number of elements, as NCCL counts them for this call.
    pub(crate) count: usize,
    pub(crate) data_type: DataType,
    pub(crate) stream: StreamHandle,
}

/// An element type of NCCL (`ncclDataType_t`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum DataType {
    /// `ncclInt8`
    Int8,
    /// `ncclUint8`; also used for other types, as bytes, by collectives that only move elements
    Uint8,
    /// `ncclInt32`
    Int32,
    /// `ncclUint32`
    Uint32,
    /// `ncclInt64`
    Int64,
    /// `ncclUint64`
    Uint64,
    /// `ncclFloat16`
    Float16,
    /// `ncclFloat32`
    Float32,
    /// `ncclFloat64`
    Float64,
    /// `ncclBfloat16`
    Bfloat16,
    /// `ncclFloat8e4m3` (NCCL 2.24)
    Float8E4M3,
    /// `ncclFloat8e5m2` (NCCL 2.24)
    Float8E5M2,
}

impl DataType {
    /// Returns the name used in flight records: "float32".
    pub(crate) fn word(self) -> &'static str {
        match self {
            DataType::Int8 => "int8",
            DataType::Uint8 => "uint8",
            DataType::Int32 => "int32",
            DataType::Uint32 => "uint32",
            DataType::Int64 => "int64",
            DataType::Uint64 => "uint64",
            DataType::Float16 => "float16",
            DataType::Float32 => "float32",
            DataType::Float64 => "float64",
            DataType::Bfloat16 => "bfloat16",
            DataType::Float8E4M3 => "float8e4m3",
            DataType::Float8E5M2 => "float8e5m2",
        }
    }

    /// Returns the size of one element in bytes.
    pub const fn size_bytes(self) -> usize {
        match self {
            DataType::Int8 | DataType::Uint8 | DataType::Float8E4M3 | DataType::Float8E5M2 => 1,
            DataType::Float16 | DataType::Bfloat16 => 2,
            DataType::Int32 | DataType::Uint32 | DataType::Float32 => 4,
            DataType::Int64 | DataType::Uint64 | DataType::Float64 => 8,
        }
    }

    pub(crate) const fn raw(self) -> c_int {
        match self {
            DataType::Int8 => 0,
            DataType::Uint8 => 1,
            DataType::Int32 => 2,
            DataType::Uint32 => 3,
            DataType::Int64 => 4,
            DataType::Uint64 => 5,
            DataType::Float16 => 6,
            DataType::Float32 => 7,
            DataType::Float64 => 8,
            DataType::Bfloat16 => 9,
            DataType::Float8E4M3 => 10,
            DataType::Float8E5M2 => 11,
        }
    }
}

/// A reduction of the elements of all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum ReduceOp {
    /// The sum.
    Sum,
    /// The product.
    Product,
    /// The maximum.
    Max,
    /// The minimum.
    Min,
    /// The mean.
    Average,
}

impl ReduceOp {
    /// Returns the name used in flight records: "sum".
    pub(crate) fn word(self) -> &'static str {
        match self {
            ReduceOp::Sum => "sum",
            ReduceOp::Product => "product",
            ReduceOp::Max => "max",
            ReduceOp::Min => "min",
            ReduceOp::Average => "average",
        }
    }

    pub(crate) const fn raw(self) -> c_int {
        match self {
            ReduceOp::Sum => 0,
            ReduceOp::Product => 1,
            ReduceOp::Max => 2,
            ReduceOp::Min => 3,
            ReduceOp::Average => 4,
        }
    }
}

/// A type whose elements NCCL can reduce.
///
/// # Safety
/// The type must have the layout of the NCCL type [`DATA_TYPE`](Self::DATA_TYPE).
pub unsafe trait NcclType: DeviceRepr {
    /// NCCL's type for the elements.
    const DATA_TYPE: DataType;
}

macro_rules! nccl_types {
    ($($type:ty = $number:ident),* $(,)?) => {
        $(
            // SAFETY: the same type under the name that C gives it.
            unsafe impl NcclType for $type {
                const DATA_TYPE: DataType = DataType::$number;
            }
        )*
    };
}

nccl_types!(i8 = Int8, u8 = Uint8, i32 = Int32, u32 = Uint32, i64 = Int64, u64 = Uint64, f32 = Float32, f64 = Float64);
#[cfg(feature = "half")]
nccl_types!(half::f16 = Float16, half::bf16 = Bfloat16);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn types_have_the_numbers_and_sizes_of_nccl_h() {
        fn check<T: NcclType>(number: c_int) {
            assert_eq!(T::DATA_TYPE.raw(), number);
            assert_eq!(T::DATA_TYPE.size_bytes(), size_of::<T>());
        }
        check::<i8>(0);
        check::<u8>(1);
        check::<i32>(2);
        check::<u32>(3);
        check::<i64>(4);
        check::<u64>(5);
        check::<f32>(7);
        check::<f64>(8);
        #[cfg(feature = "half")]
        {
            check::<half::f16>(6);
            check::<half::bf16>(9);
        }
        assert_eq!((DataType::Float8E4M3.raw(), DataType::Float8E5M2.raw()), (10, 11));
        assert_eq!(
            [ReduceOp::Sum, ReduceOp::Product, ReduceOp::Max, ReduceOp::Min, ReduceOp::Average].map(ReduceOp::raw),
            [0, 1, 2, 3, 4]
        );
    }
}
