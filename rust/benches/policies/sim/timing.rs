//! How long one pass of an engine takes: the curves of `python/kvflash/mocker/perf_model.py`.

/// Time of a pass, in microseconds: the prompt tokens it computes, then one decode step of its batch.
pub fn pass_us(prefill_tokens: u64, decodes: u64, kv_usage: f64) -> u64 {
    ((prefill_ms(prefill_tokens) + decode_ms(kv_usage, decodes)) * 1e3).round() as u64
}

fn prefill_ms(tokens: u64) -> f64 {
    if tokens == 0 {
        return 0.0;
    }
    let tokens = tokens as f64;
    4.209_989e-7 * tokens * tokens + 1.518_344e-2 * tokens + 16.501_42
}

fn decode_ms(kv_usage: f64, batch: u64) -> f64 {
    if batch == 0 {
        return 0.0;
    }
    let usage = kv_usage.min(1.0);
    let one = (-25.74 * usage * usage + 54.01 * usage + 5.74).max(1.0);
    one * (1.0 + 0.005 * (batch - 1) as f64)
}
