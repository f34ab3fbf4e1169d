//! The tables in Markdown, and their place in a manual.

use std::fmt::Write;
use std::path::Path;

use kvflash::fair::Discipline;

use crate::sim::outcome::Outcome;
use crate::sim::row::Row;
use crate::sim::workload::Workload;

const BEGIN: &str = "<!-- begin policies -->";
const END: &str = "<!-- end policies -->";

/// A table: a line for each row.
pub fn table(title: &str, workload: &Workload, runs: &[(Row, Outcome)]) -> String {
    let has_tenants = workload.clients.iter().any(|client| !client.is_light);
    let mut text = format!("{title}\n\n");
    let mut heads = vec!["", "hit", "of best", "first token p50, p99"];
    heads.extend(has_tenants.then_some("not flooding: p50, p99"));
    heads.extend(["between tokens p50, p99", "prefill, requests", "Jain", "tokens/s"]);
    let _ = writeln!(text, "| {} |\n|{}", heads.join(" | "), "---|".repeat(heads.len()));
    for (row, outcome) in runs {
        let pair = |light| {
            let of = |share| seconds(outcome.ttft_ms(share, light));
            format!("{}, {}", of(0.5), of(0.99))
        };
        let mut cells = vec![
            row.name.clone(),
            format!("{:.3}", outcome.hit_rate()),
            format!("{:.2}", outcome.of_best()),
            pair(false),
        ];
        cells.extend(has_tenants.then(|| pair(true)));
        cells.push(format!("{:.0}, {:.0} ms", outcome.gap_ms(0.5), outcome.gap_ms(0.99)));
        cells.push(format!("{:.2}, {:.2}", outcome.prefill_spread(), outcome.request_spread()));
        cells.push(format!("{:.3}", outcome.jain()));
        cells.push(format!("{:.1} k", outcome.tokens_per_s() / 1e3));
        let _ = writeln!(text, "| {} |", cells.join(" | "));
    }
    text
}

/// What turns cost: the work done behind each queue, of that behind `fcfs`.
pub fn turns(runs: &[(Row, Outcome)]) -> String {
    let queued = || runs.iter().filter_map(|(row, outcome)| Some((row.fairness?.0, outcome)));
    let Some((_, base)) = queued().find(|(discipline, _)| *discipline == Discipline::Fcfs) else {
        return String::new();
    };
    let share = |one: f64, base: f64| 100.0 * one / base;
    let others = queued().filter(|(discipline, _)| *discipline != Discipline::Fcfs);
    let each: Vec<String> = others
        .map(|(discipline, outcome)| {
            let work = share(outcome.work_per_s(), base.work_per_s());
            let end = share(base.makespan_s(), outcome.makespan_s());
            format!("`{discipline}` {work:.1} % ({end:.1} %)")
        })
        .collect();
    format!(
        "\nUncached tokens, generated ones twice, that were served while requests came (and over all, until the \
         last answer), of those of `fcfs`: {}.\n\n",
        each.join(", ")
    )
}

fn seconds(ms: f64) -> String {
    if ms < 10_000.0 { format!("{:.2} s", ms / 1e3) } else { format!("{:.0} s", ms / 1e3) }
}

/// Replace what stands between the marks of `path`.
///
/// # Errors
/// In words, with the file.
pub fn write(path: &Path, text: &str) -> Result<(), String> {
    let fault = |what: &dyn std::fmt::Display| format!("{}: {what}", path.display());
    let manual = std::fs::read_to_string(path).map_err(|error| fault(&error))?;
    let parts = manual.split_once(BEGIN).and_then(|(head, rest)| {
        let (_, tail) = rest.split_once(END)?;
        Some(format!("{head}{BEGIN}\n\n{text}\n{END}{tail}"))
    });
    let written = parts.ok_or_else(|| fault(&format!("no {BEGIN:?} with {END:?} behind it")))?;
    std::fs::write(path, written).map_err(|error| fault(&error))
}
