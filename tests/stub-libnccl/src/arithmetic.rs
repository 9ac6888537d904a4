//! The arithmetic of reductions, element by element, in the order of the ranks.

use std::ffi::c_int;

/// Returns the bytes of one element of an `ncclDataType_t`; `None` if the type does not exist.
pub fn element_bytes(data_type: c_int) -> Option<usize> {
    Some(match data_type {
        0 | 1 | 10 | 11 => 1,
        6 | 9 => 2,
        2 | 3 | 7 => 4,
        4 | 5 | 8 => 8,
        _ => return None,
    })
}

/// Returns `true` if this stub can reduce elements of the type: all types except eight-bit floats.
pub fn can_reduce(data_type: c_int, op: c_int) -> bool {
    (0..=9).contains(&data_type) && (0..=4).contains(&op)
}

/// Returns `true` if NCCL has a symmetric kernel for it; see `ncclSymkImplemented`.
pub fn is_symmetric_sum(data_type: c_int, op: c_int) -> bool {
    matches!(data_type, 6 | 7 | 9 | 10 | 11) && matches!(op, 0 | 4)
}

macro_rules! reduce_as {
    ($type:ty, $op:expr, $inputs:expr, $add:expr, $multiply:expr, $divide:expr) => {{
        const SIZE: usize = size_of::<$type>();
        let element =
            |input: &[u8], at: usize| <$type>::from_ne_bytes(input[at..at + SIZE].try_into().expect("one element"));
        let mut output = $inputs[0].clone();
        for at in (0..output.len()).step_by(SIZE) {
            let mut value = element(&$inputs[0], at);
            for input in &$inputs[1..] {
                let other = element(input, at);
                value = match $op {
                    0 | 4 => $add(value, other),
                    1 => $multiply(value, other),
                    2 => {
                        if other > value {
                            other
                        } else {
                            value
                        }
                    }
                    _ => {
                        if other < value {
                            other
                        } else {
                            value
                        }
                    }
                };
            }
            if $op == 4 {
                value = $divide(value, $inputs.len());
            }
            output[at..at + SIZE].copy_from_slice(&value.to_ne_bytes());
        }
        output
    }};
}

macro_rules! reduce_integers {
    ($type:ty, $op:expr, $inputs:expr) => {
        reduce_as!($type, $op, $inputs, <$type>::wrapping_add, <$type>::wrapping_mul, |sum: $type, ranks| sum
            / ranks as $type)
    };
}

macro_rules! reduce_floats {
    ($type:ty, $op:expr, $inputs:expr) => {
        reduce_as!($type, $op, $inputs, |a: $type, b| a + b, |a: $type, b| a * b, |sum: $type, ranks| sum
            / ranks as $type)
    };
}

/// Reduces inputs of equal length, one per rank.
pub fn reduce(data_type: c_int, op: c_int, inputs: &[Vec<u8>]) -> Vec<u8> {
    match data_type {
        0 => reduce_integers!(i8, op, inputs),
        1 => reduce_integers!(u8, op, inputs),
        2 => reduce_integers!(i32, op, inputs),
        3 => reduce_integers!(u32, op, inputs),
        4 => reduce_integers!(i64, op, inputs),
        5 => reduce_integers!(u64, op, inputs),
        6 => reduce_halves(op, inputs, f16_to_f32, f32_to_f16),
        7 => reduce_floats!(f32, op, inputs),
        8 => reduce_floats!(f64, op, inputs),
        9 => reduce_halves(op, inputs, |bits| f32::from_bits(u32::from(bits) << 16), f32_to_bf16),
        _ => unreachable!("the call checked the operation"),
    }
}

/// Reduces two-byte floats as `f32`, and rounds once.
fn reduce_halves(op: c_int, inputs: &[Vec<u8>], widen: fn(u16) -> f32, narrow: fn(f32) -> u16) -> Vec<u8> {
    let wide: Vec<Vec<u8>> = inputs
        .iter()
        .map(|input| {
            let halves = input.chunks_exact(2).map(|bytes| u16::from_ne_bytes([bytes[0], bytes[1]]));
            halves.flat_map(|bits| widen(bits).to_ne_bytes()).collect()
        })
        .collect();
    let reduced = reduce_floats!(f32, op, &wide);
    let words = reduced.chunks_exact(4).map(|bytes| f32::from_ne_bytes(bytes.try_into().expect("four bytes")));
    words.flat_map(|value| narrow(value).to_ne_bytes()).collect()
}

fn f16_to_f32(bits: u16) -> f32 {
    let (sign, exponent, fraction) = (bits >> 15, (bits >> 10) & 0x1f, bits & 0x3ff);
    let magnitude = match exponent {
        0 => f32::from(fraction) * 2f32.powi(-24),
        0x1f if fraction == 0 => f32::INFINITY,
        0x1f => f32::NAN,
        _ => f32::from(fraction | 0x400) * 2f32.powi(i32::from(exponent) - 25),
    };
    if sign == 1 { -magnitude } else { magnitude }
}

/// Converts to the nearest value, with ties to even.
fn f32_to_f16(value: f32) -> u16 {
    let sign = ((value.to_bits() >> 16) & 0x8000) as u16;
    let magnitude = value.abs();
    if magnitude.is_nan() {
        return sign | 0x7e00;
    }
    if magnitude >= 65520.0 {
        return sign | 0x7c00;
    }
    // The distance between adjacent values of this magnitude is 2^(exponent - 10).
    let exponent = ((magnitude.to_bits() >> 23) as i32 - 127).max(-14);
    let steps = (magnitude / 2f32.powi(exponent - 10)).round_ties_even() as u16;
    // A step count of 0x400 or more carries into the exponent automatically.
    sign | ((((exponent + 14) as u16) << 10) + steps)
}

/// Converts to the nearest value, with ties to even.
fn f32_to_bf16(value: f32) -> u16 {
    let bits = value.to_bits();
    if value.is_nan() {
        return (bits >> 16) as u16 | 0x40;
    }
    ((bits + 0x7fff + ((bits >> 16) & 1)) >> 16) as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_half_survives_a_round_trip() {
        for bits in 0..=u16::MAX {
            let value = f16_to_f32(bits);
            assert!(value.is_nan() || f32_to_f16(value) == bits, "{bits:#x} {value}");
            let value = f32::from_bits(u32::from(bits) << 16);
            assert!(value.is_nan() || f32_to_bf16(value) == bits, "{bits:#x} {value}");
        }
        assert_eq!(f32_to_f16(2049.0), f32_to_f16(2048.0), "ties to even");
        assert_eq!(f32_to_f16(1e-9), 0);
    }
}
