//! An encoder of the tests' own, which can also write what no engine would.

use rmp::encode as write;

/// A msgpack value, written as its variant says.
#[derive(Debug, Clone)]
pub(super) enum Wire {
    Nil,
    Int(i64),
    Uint(u64),
    Float(f64),
    Text(String),
    Bytes(Vec<u8>),
    List(Vec<Wire>),
    Map(Vec<(&'static str, Wire)>),
}

pub(super) use Wire::{Bytes, Float, Int, List, Map, Nil, Text, Uint};

impl Wire {
    fn write(&self, out: &mut Vec<u8>) {
        match self {
            Nil => write::write_nil(out).unwrap(),
            Int(value) => drop(write::write_sint(out, *value).unwrap()),
            Uint(value) => drop(write::write_uint(out, *value).unwrap()),
            Float(value) => write::write_f64(out, *value).unwrap(),
            Text(text) => write::write_str(out, text).unwrap(),
            Bytes(bytes) => write::write_bin(out, bytes).unwrap(),
            List(values) => {
                write::write_array_len(out, values.len() as u32).unwrap();
                values.iter().for_each(|value| value.write(out));
            }
            Map(entries) => {
                write::write_map_len(out, entries.len() as u32).unwrap();
                for (key, value) in entries {
                    write::write_str(out, key).unwrap();
                    value.write(out);
                }
            }
        }
    }

    pub(super) fn bytes(&self) -> Vec<u8> {
        let mut out = Vec::new();
        self.write(&mut out);
        out
    }
}

pub(super) fn text(text: &str) -> Wire {
    Text(text.to_owned())
}

pub(super) fn optional<T>(value: &Option<T>, wire: impl Fn(&T) -> Wire) -> Wire {
    value.as_ref().map_or(Nil, wire)
}

pub(super) fn uints<T: Copy + Into<u64>>(values: &[T]) -> Wire {
    List(values.iter().map(|&value| Uint(value.into())).collect())
}

pub(super) fn tokens(values: &[u64]) -> Wire {
    uints(values)
}
