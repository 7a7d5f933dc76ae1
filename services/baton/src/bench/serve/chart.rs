//! SVG chart of latency percentiles over the load.

use std::{fs::File, io::Write};

use anyhow::{Context, Result, anyhow};
use plotters::{
    chart::{ChartBuilder, SeriesLabelPosition},
    drawing::IntoDrawingArea,
    prelude::SVGBackend,
    series::LineSeries,
    style::{Color, RGBColor, WHITE},
};

use super::report::{LoadPoint, OfferedLoad, ServeReport};
use crate::bench::stats::Percentiles;

const SIZE: (u32, u32) = (960, 1020);
/// Distinct for most eyes, also in grey (Okabe and Ito 2008).
pub const COLOURS: [RGBColor; 6] = [
    RGBColor(0, 158, 115),
    RGBColor(230, 159, 0),
    RGBColor(213, 94, 0),
    RGBColor(0, 114, 178),
    RGBColor(204, 121, 167),
    RGBColor(86, 180, 233),
];
const LINE_WIDTH: u32 = 2;
const THIN_LINE_WIDTH: u32 = 1;

/// Function that selects the percentiles of a panel.
type PanelOf = fn(&LoadPoint) -> &Percentiles;
/// Function that selects the percentile of a line.
type PercentileOf = fn(&Percentiles) -> f64;

/// A line of each panel.
struct ChartLine<'a> {
    label: String,
    points: Vec<&'a LoadPoint>,
    percentile: PercentileOf,
    colour: RGBColor,
    width: u32,
}

/// Draws one panel each for time to first token, inter-token latency and request duration. Loads
/// without a completed request are left out.
pub(super) fn write(report: &ServeReport, mut file: File) -> Result<()> {
    let svg = draw(report).map_err(|error| anyhow!("the chart cannot be drawn: {error}"))?;
    file.write_all(svg.as_bytes()).context("cannot write the chart")
}

fn draw(report: &ServeReport) -> Result<String, Box<dyn std::error::Error>> {
    let lines = lines(report);
    let mut svg = String::new();
    {
        let area = SVGBackend::with_string(&mut svg, SIZE).into_drawing_area();
        area.fill(&WHITE)?;
        let title = format!("{}, {}", report.server.model, report.workload);
        let panels = area.titled(&title, ("sans-serif", 22))?.split_evenly((3, 1));
        let named: [(&str, PanelOf); 3] = [
            ("time to first token, ms", |point| &point.ttft_ms),
            ("inter-token latency, ms", |point| &point.itl_ms),
            ("end to end, ms", |point| &point.e2e_ms),
        ];
        for (panel, (name, of)) in panels.iter().zip(named) {
            let points = || lines.iter().flat_map(|line| &line.points);
            let (low, high) = extent(points().map(|point| point.load.value()));
            let (_, top) = extent(points().flat_map(|point| [of(point).p50, of(point).p99]));
            let mut chart = ChartBuilder::on(panel)
                .margin(12)
                .caption(name, ("sans-serif", 16))
                .x_label_area_size(36)
                .y_label_area_size(64)
                .build_cartesian_2d(low * 0.95..high * 1.05, 0.0..top * 1.1)?;
            chart.configure_mesh().x_desc(load_name(report)).y_desc("ms").draw()?;
            for line in &lines {
                let values = line.points.iter();
                let values = values.map(|point| (point.load.value(), (line.percentile)(of(point))));
                let style = line.colour.stroke_width(line.width);
                let series = LineSeries::new(values, style).point_size(line.width + 1);
                chart.draw_series(series)?.label(&line.label).legend(move |(x, y)| {
                    plotters::element::PathElement::new(vec![(x, y), (x + 18, y)], style)
                });
            }
            chart
                .configure_series_labels()
                .position(SeriesLabelPosition::UpperLeft)
                .border_style(colour_of_frame())
                .draw()?;
        }
        area.present()?;
    }
    Ok(svg)
}

/// Returns the lines of each panel: three percentiles of one server, or median and tail of each of
/// several.
fn lines(report: &ServeReport) -> Vec<ChartLine<'_>> {
    let percentiles: [(&str, PercentileOf); 3] =
        [("p50", |of| of.p50), ("p99", |of| of.p99), ("p90", |of| of.p90)];
    let is_alone = report.compared.is_empty();
    let mut lines = Vec::new();
    for (server, colour) in report.servers().zip(COLOURS.iter().cycle()) {
        let mut points: Vec<&LoadPoint> =
            server.points.iter().filter(|point| point.completed > 0).collect();
        points.sort_by(|a, b| a.load.value().total_cmp(&b.load.value()));
        for (index, (name, percentile)) in
            percentiles.into_iter().enumerate().take(if is_alone { 3 } else { 2 })
        {
            let points = points.clone();
            lines.push(match is_alone {
                true => {
                    let colour = COLOURS[index];
                    ChartLine {
                        label: name.to_owned(),
                        points,
                        percentile,
                        colour,
                        width: LINE_WIDTH,
                    }
                }
                false => ChartLine {
                    label: format!("{} {name}", server.url),
                    points,
                    percentile,
                    colour: *colour,
                    width: if index == 0 { LINE_WIDTH } else { THIN_LINE_WIDTH },
                },
            });
        }
    }
    lines
}

fn colour_of_frame() -> RGBColor {
    RGBColor(120, 120, 120)
}

fn load_name(report: &ServeReport) -> &'static str {
    match report.server.points.first().map(|point| point.load) {
        Some(OfferedLoad::Concurrency(_)) => "conversations at once",
        Some(OfferedLoad::RateScale(_)) => "arrival rate, as a multiple of the trace's",
        Some(OfferedLoad::Rate(_)) | None => "arrivals per second",
    }
}

/// Returns a positive, non-empty range.
fn extent(values: impl Iterator<Item = f64>) -> (f64, f64) {
    let (low, high) = values
        .filter(|value| value.is_finite() && *value > 0.0)
        .fold((f64::INFINITY, 0.0_f64), |(low, high), value| (low.min(value), high.max(value)));
    if low > high { (1.0, 2.0) } else { (low, high.max(low * 1.01)) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::serve::{
        client::MeasuredRequest,
        length::Length,
        report::{ConversationOutcome, ServerReport},
    };

    fn report(rates: &[f64]) -> ServeReport {
        let point = |&rate: &f64| {
            let measured = MeasuredRequest {
                prompt_tokens: 1,
                cached_tokens: 0,
                token_times: vec![rate, rate * 1.5, rate * 2.0],
                end: rate * 2.0,
                token_ids: None,
            };
            let outcome =
                ConversationOutcome { turns: vec![measured], error: None, elapsed_s: 1.0 };
            LoadPoint::of(OfferedLoad::Rate(rate), &[outcome], 1.0, None)
        };
        ServeReport {
            server: ServerReport {
                url: "first".to_owned(),
                model: "a <model> & more".to_owned(),
                points: rates.iter().map(point).collect(),
            },
            compared: Vec::new(),
            workload: "random".to_owned(),
            input_tokens: Length::Uniform { low: 1, high: 1 },
            output_tokens: Length::Uniform { low: 3, high: 3 },
            seed: 0,
            goodput_limits: None,
        }
    }

    #[test]
    fn chart_has_a_line_for_each_percentile_in_each_panel() {
        let svg = draw(&report(&[4.0, 1.0, 2.0])).unwrap();
        assert!(svg.trim_end().ends_with("</svg>"));
        // Nine lines, and nine in the legends.
        assert!(svg.matches("<polyline").count() >= 18, "{svg}");
        for text in ["time to first token, ms", "p50", "p90", "p99", "arrivals per second"] {
            assert!(svg.contains(text), "{text}");
        }
        assert!(svg.contains("&lt;model&gt; &amp; more"));
    }

    #[test]
    fn chart_of_several_servers_has_median_and_tail_of_each() {
        let mut report = report(&[1.0, 2.0]);
        report.compared = vec![ServerReport {
            url: "second".to_owned(),
            model: "model".to_owned(),
            points: report.server.points.drain(..1).collect(),
        }];
        let svg = draw(&report).unwrap();
        // Four lines in each of three panels, and four in each legend.
        assert!(svg.matches("<polyline").count() >= 24, "{svg}");
        for text in ["first p50", "first p99", "second p50", "second p99"] {
            assert_eq!(svg.matches(text).count(), 3, "{text}");
        }
        assert!(!svg.contains("p90"));
    }

    #[test]
    fn chart_of_one_point_or_none_is_valid() {
        for rates in [&[][..], &[1.0]] {
            assert!(draw(&report(rates)).unwrap().contains("<svg"));
        }
    }
}
