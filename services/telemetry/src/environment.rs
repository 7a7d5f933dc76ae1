//! The standard `OTEL_*` variables.
//!
//! OpenTelemetry's library reads the headers, the sampler and the resource attributes itself, and
//! ignores what it does not understand. This module reads the endpoints, and rejects values that
//! the library would ignore.

use std::path::PathBuf;

use crate::TelemetryError;

const SAMPLER: &str = "OTEL_TRACES_SAMPLER";
const SAMPLER_ARG: &str = "OTEL_TRACES_SAMPLER_ARG";
const SAMPLERS: &str = "always_on, always_off, traceidratio, parentbased_always_on, parentbased_always_off or \
     parentbased_traceidratio";

/// Destination of traces and metrics: OTLP over gRPC.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Otlp {
    /// `http://host:port` or `https://host:port`; `None`: no export.
    pub traces: Option<String>,
    pub metrics: Option<String>,
    /// PEM file of the CA certificates that https trusts; `None`: Mozilla's root certificates.
    pub certificate: Option<PathBuf>,
}

impl Otlp {
    /// Exports traces and metrics to one collector.
    pub fn to(endpoint: String) -> Self {
        Self { traces: Some(endpoint.clone()), metrics: Some(endpoint), certificate: None }
    }

    /// Reads the destination. `setting` (`telemetry.otlp`) has the highest precedence, then the
    /// variable of the signal, then the common variable. `get`: the environment, and a map in
    /// tests.
    pub fn read(
        setting: Option<&str>,
        get: impl Fn(&str) -> Option<String>,
    ) -> Result<Self, TelemetryError> {
        let get = |name: &str| get(name).filter(|value| !value.is_empty());
        let either = |signal: &str, what: &str| {
            get(&format!("OTEL_EXPORTER_OTLP_{signal}_{what}"))
                .or_else(|| get(&format!("OTEL_EXPORTER_OTLP_{what}")))
        };
        let endpoint = |signal| match setting {
            Some(setting) => Some(setting.to_owned()),
            None => either(signal, "ENDPOINT"),
        };
        let found = Self {
            traces: endpoint("TRACES"),
            metrics: endpoint("METRICS"),
            certificate: get("OTEL_EXPORTER_OTLP_CERTIFICATE").map(PathBuf::from),
        };
        for signal in ["TRACES", "METRICS"] {
            if let Some(value) = either(signal, "PROTOCOL").filter(|value| value != "grpc") {
                return Err(invalid("OTEL_EXPORTER_OTLP_PROTOCOL", value, "grpc"));
            }
        }
        if let Some(sampler) = get(SAMPLER) {
            match sampler.strip_prefix("parentbased_").unwrap_or(&sampler) {
                "always_on" | "always_off" => {}
                "traceidratio" => {
                    let ratio = get(SAMPLER_ARG).unwrap_or_default();
                    if !ratio.parse().is_ok_and(|ratio: f64| (0.0..=1.0).contains(&ratio)) {
                        return Err(invalid(SAMPLER_ARG, ratio, "a number from 0 to 1"));
                    }
                }
                _ => return Err(invalid(SAMPLER, sampler, SAMPLERS)),
            }
        }
        Ok(found)
    }

    pub(crate) fn exports(&self) -> bool {
        self.traces.is_some() || self.metrics.is_some()
    }
}

fn invalid(name: &'static str, value: String, allowed: &'static str) -> TelemetryError {
    TelemetryError::BadVariable { name, value, allowed }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    fn read(setting: Option<&str>, variables: &[(&str, &str)]) -> Result<Otlp, String> {
        let variables: BTreeMap<_, _> = variables.iter().copied().collect();
        Otlp::read(setting, |name| variables.get(name).map(|value| (*value).to_owned()))
            .map_err(|error| error.to_string())
    }

    #[test]
    fn a_setting_comes_before_a_variable_and_a_signal_before_the_common_variable() {
        let common = ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://common:4317");
        let traces = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "https://traces:4317");
        let to = |traces: &str, metrics: &str| {
            Ok(Otlp {
                traces: Some(traces.into()),
                metrics: Some(metrics.into()),
                certificate: None,
            })
        };
        assert_eq!(read(None, &[]), Ok(Otlp::default()));
        assert_eq!(read(None, &[("OTEL_EXPORTER_OTLP_ENDPOINT", "")]), Ok(Otlp::default()));
        assert_eq!(read(None, &[common]), to("http://common:4317", "http://common:4317"));
        assert_eq!(read(None, &[common, traces]), to("https://traces:4317", "http://common:4317"));
        let setting = Some("http://setting:1");
        assert_eq!(read(setting, &[common, traces]), to("http://setting:1", "http://setting:1"));
        let only = read(None, &[traces]).unwrap();
        assert_eq!((only.metrics, only.traces.is_some()), (None, true));
    }

    #[test]
    fn values_that_the_library_would_ignore_are_rejected() {
        let protocol = ("OTEL_EXPORTER_OTLP_METRICS_PROTOCOL", "http/protobuf");
        let error = "invalid OTEL_EXPORTER_OTLP_PROTOCOL: \"http/protobuf\"; expected grpc";
        assert_eq!(read(None, &[protocol]), Err(error.into()));
        for sampler in ["always_on", "parentbased_always_off"] {
            assert!(read(None, &[(SAMPLER, sampler)]).is_ok(), "{sampler}");
        }
        for sampler in ["xray", "parentbased_parentbased_always_off"] {
            assert!(
                read(None, &[(SAMPLER, sampler)]).unwrap_err().ends_with(SAMPLERS),
                "{sampler}"
            );
        }
        let ratio = (SAMPLER, "parentbased_traceidratio");
        assert!(read(None, &[ratio, (SAMPLER_ARG, "0.25")]).is_ok());
        for argument in ["", "2", "half", "NaN"] {
            let error = read(None, &[ratio, (SAMPLER_ARG, argument)]).unwrap_err();
            assert!(error.contains(SAMPLER_ARG) && error.contains("0 to 1"), "{error}");
        }
    }
}
