//! Distributions of the latencies as an SVG chart: a line for each policy.

use std::{fs::File, io::Write};

use anyhow::{Context, Result, anyhow};
use config::NodePolicy;
use plotters::{
    chart::{ChartBuilder, SeriesLabelPosition},
    drawing::IntoDrawingArea,
    element::PathElement,
    prelude::SVGBackend,
    series::LineSeries,
    style::{Color, RGBColor, WHITE},
};
use simulation::{ReplayOutcome, ServedRequest};

use crate::bench::serve::COLOURS;

const SIZE: (u32, u32) = (960, 720);
/// Function that selects the latency of a panel.
type MillisOf = fn(&ServedRequest) -> f64;

/// Points of a line.
const POINTS: usize = 200;

/// Draws the cumulative distribution of the time to first token, and of the time per output token.
pub(super) fn write(
    title: &str,
    outcomes: &[(NodePolicy, &ReplayOutcome)],
    mut file: File,
) -> Result<()> {
    let svg =
        draw(title, outcomes).map_err(|error| anyhow!("the chart cannot be drawn: {error}"))?;
    file.write_all(svg.as_bytes()).context("cannot write the chart")
}

fn draw(
    title: &str,
    outcomes: &[(NodePolicy, &ReplayOutcome)],
) -> Result<String, Box<dyn std::error::Error>> {
    let mut svg = String::new();
    {
        let area = SVGBackend::with_string(&mut svg, SIZE).into_drawing_area();
        area.fill(&WHITE)?;
        let panels = area.titled(title, ("sans-serif", 18))?.split_evenly((2, 1));
        let millis: [(&str, MillisOf); 2] = [
            ("time to first token, ms", |request| request.ttft.as_secs_f64() * 1e3),
            ("time per output token, ms", |request| request.time_per_token().as_secs_f64() * 1e3),
        ];
        for (panel, (name, of)) in panels.iter().zip(millis) {
            let lines: Vec<_> =
                outcomes.iter().map(|(policy, replayed)| (policy, points(replayed, of))).collect();
            let top = lines.iter().flat_map(|(_, points)| points).map(|point| point.1);
            let top = top.fold(1e-3, f64::max);
            let mut chart = ChartBuilder::on(panel)
                .margin(12)
                .caption(name, ("sans-serif", 16))
                .x_label_area_size(36)
                .y_label_area_size(64)
                .build_cartesian_2d(0.0..100.0, 0.0..top * 1.05)?;
            chart.configure_mesh().x_desc("percentile").y_desc("ms").draw()?;
            for ((policy, points), colour) in lines.into_iter().zip(COLOURS.iter().cycle()) {
                let style = colour.stroke_width(2);
                chart
                    .draw_series(LineSeries::new(points, style))?
                    .label(policy.to_string())
                    .legend(move |(x, y)| PathElement::new(vec![(x, y), (x + 18, y)], style));
            }
            chart
                .configure_series_labels()
                .position(SeriesLabelPosition::UpperLeft)
                .border_style(RGBColor(120, 120, 120))
                .draw()?;
        }
        area.present()?;
    }
    Ok(svg)
}

/// Returns percentiles and values up to the 99th percentile: the longest request would hide the
/// others.
fn points(replayed: &ReplayOutcome, of: MillisOf) -> Vec<(f64, f64)> {
    let mut values: Vec<f64> = replayed.requests.iter().map(of).collect();
    values.sort_by(f64::total_cmp);
    let Some(last) = values.len().checked_sub(1) else { return Vec::new() };
    let percents = (0..=POINTS).map(|index| 99.0 * index as f64 / POINTS as f64);
    percents.map(|percent| (percent, values[(percent / 100.0 * last as f64) as usize])).collect()
}
