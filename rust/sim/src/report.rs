//! The tables in Markdown, and their place in a manual.

use std::fmt::Write;
use std::path::Path;

use kvflash_core::fair::Discipline;

use crate::matrix::{METRICS, Played, TTFT_P99};
use crate::outcome::Outcome;
use crate::row::Row;
use crate::workload::Workload;

/// A table: a line for each row.
pub fn table(title: &str, workload: &Workload, runs: &[(Row, Outcome)]) -> String {
    let has_tenants = workload.clients.iter().any(|client| !client.is_light);
    let mut text = format!("{title}\n\n");
    let mut heads = vec!["", "hit", "of best", "first token p50, p99"];
    heads.extend(has_tenants.then_some("not flooding: p50, p99"));
    heads.extend(["between tokens p50, p99", "prefill, requests", "Jain", "tokens/s"]);
    head(&mut text, &heads);
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
        let (prefill, requests) =
            (outcome.spread(|totals| totals.prefilled), outcome.spread(|totals| totals.requests));
        cells.push(format!("{prefill:.2}, {requests:.2}"));
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

fn head(text: &mut String, heads: &[impl AsRef<str>]) {
    let heads: Vec<&str> = heads.iter().map(AsRef::as_ref).collect();
    let _ = writeln!(text, "| {} |\n|{}", heads.join(" | "), "---|".repeat(heads.len()));
}

fn seconds(ms: f64) -> String {
    if ms < 10_000.0 { format!("{:.2} s", ms / 1e3) } else { format!("{:.0} s", ms / 1e3) }
}

/// The geometric mean.
pub fn mean(values: impl Iterator<Item = f64>) -> f64 {
    let (sum, count) = values.fold((0.0, 0), |(sum, count), value| (sum + value.ln(), count + 1));
    (sum / f64::from(count.max(1))).exp()
}

/// Each row's regret by metric over all cells, its mean, and its worst figures.
pub fn regrets(rows: &[Row], played: &[Played]) -> String {
    let all: Vec<Vec<[f64; 10]>> = played.iter().map(Played::regrets).collect();
    let mut text = String::new();
    let mut heads = vec!["", "all"];
    heads.extend(METRICS);
    heads.extend(["worst TTFT p99", "worst of all"]);
    head(&mut text, &heads);
    for (at, row) in rows.iter().enumerate() {
        let of = |metric: usize| mean(all.iter().map(|cell| cell[at][metric]));
        let mut cells = vec![row.name.clone(), format!("{:.3}", mean((0..METRICS.len()).map(of)))];
        cells.extend((0..METRICS.len()).map(|metric| format!("{:.2}", of(metric))));
        let worst = |metrics: std::ops::Range<usize>| {
            let each = all.iter().zip(played);
            let each = each.flat_map(|(cell, played)| {
                metrics.clone().map(move |metric| (cell[at][metric], metric, played))
            });
            each.max_by(|a, b| a.0.total_cmp(&b.0))
        };
        if let Some((regret, _, played)) = worst(TTFT_P99..TTFT_P99 + 1) {
            cells.push(format!("{regret:.2} ({}: {})", played.cell.group, played.cell.name));
        }
        if let Some((regret, metric, played)) = worst(0..METRICS.len()) {
            let (group, name) = (played.cell.group, &played.cell.name);
            cells.push(format!("{regret:.2} ({}, {group}: {name})", METRICS[metric]));
        }
        let _ = writeln!(text, "| {} |", cells.join(" | "));
    }
    text
}

/// Each row's mean regret in each cell, and what could be reused there.
pub fn cells(rows: &[Row], played: &[Played]) -> String {
    let mut text = String::new();
    let mut heads: Vec<String> = vec![String::new()];
    heads.extend(rows.iter().map(|row| row.name.clone()));
    heads.extend(["hit of the first row", "one pool", "partition"].map(String::from));
    head(&mut text, &heads);
    for one in played {
        let mut cells = vec![format!("{}: {}", one.cell.group, one.cell.name)];
        let regrets = one.regrets();
        cells.extend(regrets.iter().map(|row| format!("{:.2}", mean(row.iter().copied()))));
        cells.extend(one.figures.first().map(|first| format!("{:.3}", first.hit)));
        cells.push(format!("{:.3}", one.bounds.one_pool));
        cells.push(format!("{:.3}", one.bounds.partition));
        let _ = writeln!(text, "| {} |", cells.join(" | "));
    }
    text
}

/// Every figure of every row in every cell, as comma-separated values.
pub fn figures(rows: &[Row], played: &[Played]) -> String {
    let mut text = format!("group,cell,row,hit,of best,utilization,{}\n", METRICS.join(","));
    for one in played {
        for (row, figures) in rows.iter().zip(&one.figures) {
            let quoted = |text: &str| format!("\"{text}\"");
            let mut cells = vec![quoted(one.cell.group), quoted(&one.cell.name), quoted(&row.name)];
            let shares = [figures.hit, figures.of_best, figures.utilization];
            let values = shares.into_iter().chain(figures.values);
            cells.extend(values.map(|value| format!("{value:.4}")));
            let _ = writeln!(text, "{}", cells.join(","));
        }
    }
    text
}

/// Replace what stands between the marks `name` of the file at `path`.
///
/// # Errors
/// In words, with the file.
pub fn write(path: &Path, name: &str, text: &str) -> Result<(), String> {
    let fault = |what: &dyn std::fmt::Display| format!("{}: {what}", path.display());
    let (begin, end) = (format!("<!-- begin {name} -->"), format!("<!-- end {name} -->"));
    let manual = std::fs::read_to_string(path).map_err(|error| fault(&error))?;
    let parts = manual.split_once(&begin).and_then(|(head, rest)| {
        let (_, tail) = rest.split_once(&end)?;
        Some(format!("{head}{begin}\n\n{}\n{end}{tail}", text.trim_end()))
    });
    let written = parts.ok_or_else(|| fault(&format!("no {begin:?} with {end:?} behind it")))?;
    std::fs::write(path, written).map_err(|error| fault(&error))
}
