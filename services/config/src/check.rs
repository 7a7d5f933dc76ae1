//! Checks of several settings together, and values that derive from several settings.

use std::{fs, net::IpAddr};

use crate::{
    error::{ConfigError, Problem, Source},
    load::{Config, all_settings},
    schema::{Model, Transfer},
    types::{ModelPath, Pair, Secret, ToolFormat},
    value::Value,
};

impl Config {
    /// Lowers a default that exceeds a limit which the operator set: with a small `step_tokens` the default of
    /// `chunk_tokens` shrinks too.
    pub(crate) fn fit_defaults(&mut self) {
        let node = self.node.clone();
        self.lower("node.chunk_tokens", node.step_tokens, |config| &mut config.node.chunk_tokens);
        self.lower("node.slots", node.step_tokens, |config| &mut config.node.slots);
        self.lower("node.speculate_ngram_min", node.speculate_ngram_max, |config| {
            &mut config.node.speculate_ngram_min
        });
        let router = self.router.clone();
        self.lower("router.timeout", router.timeout_max, |config| &mut config.router.timeout);
        self.lower("router.waiting_max", router.requests_max, |config| {
            &mut config.router.waiting_max
        });
    }

    fn lower<T: Value + PartialOrd>(
        &mut self,
        key: &str,
        limit: T,
        field: impl Fn(&mut Self) -> &mut T,
    ) {
        if self.source_of(key) == Source::Default && *field(self) > limit {
            if let Some(explained) = self.explained.iter_mut().find(|e| e.setting.key() == key) {
                explained.value = limit.show();
            }
            *field(self) = limit;
        }
    }

    /// Reports pairs of explicitly set values that exclude each other.
    pub(crate) fn check_combinations(&self, problems: &mut Vec<Problem>) {
        let mut conflict = |detail: String| problems.push(Problem::Conflict { detail });
        let at = |key: &str| format!("{key} ({})", self.source_of(key));

        let node = &self.node;
        if node.chunk_tokens > node.step_tokens {
            conflict(format!(
                "{} = {} exceeds {} = {}: a chunk is part of a step",
                at("node.chunk_tokens"),
                node.chunk_tokens,
                at("node.step_tokens"),
                node.step_tokens,
            ));
        }
        if node.slots > node.step_tokens {
            conflict(format!(
                "{} = {} exceeds {} = {}: each row of the batch takes a token of the step",
                at("node.slots"),
                node.slots,
                at("node.step_tokens"),
                node.step_tokens,
            ));
        }
        if node.speculate_ngram_min > node.speculate_ngram_max {
            conflict(format!(
                "{} = {} exceeds {} = {}",
                at("node.speculate_ngram_min"),
                node.speculate_ngram_min,
                at("node.speculate_ngram_max"),
                node.speculate_ngram_max,
            ));
        }
        if let (Some(cpus), Some(numa_node)) = (&node.cpus, node.numa_node) {
            conflict(format!(
                "{} = {cpus} and {} = {numa_node} are both set; give one",
                at("node.cpus"),
                at("node.numa_node"),
            ));
        }
        if let (Some(cpus), Some(threads)) = (&node.cpus, node.threads)
            && threads as usize > cpus.cpus().len()
        {
            conflict(format!(
                "{} = {threads} exceeds the {} CPUs of {} = {cpus}: each thread needs a CPU",
                at("node.threads"),
                cpus.cpus().len(),
                at("node.cpus"),
            ));
        }
        let router = &self.router;
        if router.timeout > router.timeout_max {
            conflict(format!(
                "{} = {} exceeds {} = {}",
                at("router.timeout"),
                router.timeout.show(),
                at("router.timeout_max"),
                router.timeout_max.show(),
            ));
        }
        let mut names: Vec<String> = self.model.served_name().into_iter().collect();
        for Pair { name, value } in &router.models {
            if ModelPath::parse(value).is_none() {
                conflict(format!(
                    "{} has {name}={value}; allowed: {}",
                    at("router.models"),
                    <ModelPath as Value>::allowed(),
                ));
            }
            if names.contains(name) {
                conflict(format!(
                    "{} names {name:?}, but another model has this name",
                    at("router.models"),
                ));
            }
            names.push(name.clone());
        }
        let model_count = names.len();
        for (key, pairs) in [
            ("router.chat_templates", &router.chat_templates),
            ("router.tool_formats", &router.tool_formats),
        ] {
            for (index, pair) in pairs.iter().enumerate() {
                if !router.models.iter().any(|model| model.name == pair.name) {
                    conflict(format!(
                        "{} has {pair}: router.models has no {:?}; allowed: {}",
                        at(key),
                        pair.name,
                        match &router.models[..] {
                            [] => "none, because router.models is empty".to_owned(),
                            models => {
                                let names: Vec<&str> =
                                    models.iter().map(|model| model.name.as_str()).collect();
                                names.join(", ")
                            }
                        },
                    ));
                }
                if pairs[..index].iter().any(|other| other.name == pair.name) {
                    conflict(format!("{} names {:?} twice", at(key), pair.name));
                }
            }
        }
        for pair in &router.tool_formats {
            if ToolFormat::parse(&pair.value).is_none() {
                conflict(format!(
                    "{} has {pair}; allowed: {}",
                    at("router.tool_formats"),
                    <ToolFormat as Value>::allowed(),
                ));
            }
        }
        for pair @ Pair { name: alias, value: name } in &router.aliases {
            if !names[..model_count].contains(name) {
                conflict(format!(
                    "{} has {pair}: there is no model {name:?}; allowed: {}",
                    at("router.aliases"),
                    names[..model_count].join(", "),
                ));
            }
            if names.contains(alias) {
                conflict(format!(
                    "{} has {pair}: {alias:?} is already taken",
                    at("router.aliases")
                ));
            }
            names.push(alias.clone());
        }
        let transfer = &self.transfer;
        if transfer.secret.is_some() && transfer.secret_file.is_some() {
            conflict(format!(
                "{} and {} are both set; give one",
                at("transfer.secret"),
                at("transfer.secret_file"),
            ));
        }
        if transfer.advertise.is_none()
            && (transfer.control.ip().is_unspecified() || transfer.data.ip().is_unspecified())
        {
            conflict(format!(
                "{} = {} or {} = {} listens on every address; set transfer.advertise to the host \
                 under which peers reach this node",
                at("transfer.control"),
                transfer.control,
                at("transfer.data"),
                transfer.data,
            ));
        }
        let cluster = &self.cluster;
        for (index, url) in cluster.prefill.iter().chain(&cluster.decode).enumerate() {
            if cluster.prefill.iter().chain(&cluster.decode).take(index).any(|other| other == url) {
                conflict(format!(
                    "{url} is listed twice in {} and {}; a node has one role",
                    at("cluster.prefill"),
                    at("cluster.decode"),
                ));
            }
        }
        self.check_etcd(&mut conflict);
    }

    fn check_etcd(&self, conflict: &mut impl FnMut(String)) {
        let cluster = &self.cluster;
        if cluster.etcd.is_empty() {
            return;
        }
        let at = |key: &str| format!("{key} ({})", self.source_of(key));
        let etcd = at("cluster.etcd");
        for (key, list) in
            [("cluster.prefill", &cluster.prefill), ("cluster.decode", &cluster.decode)]
        {
            if !list.is_empty() {
                let listed = at(key);
                conflict(format!("{etcd} and {listed} are both set; list the nodes or use etcd"));
            }
        }
        let https = cluster.etcd.iter().filter(|url| url.is_https()).count();
        if https > 0 && https < cluster.etcd.len() {
            conflict(format!("{etcd} has http and https endpoints; give all of them one scheme"));
        } else if https > 0 && cluster.etcd_ca.is_none() {
            conflict(format!("{etcd} is https; set cluster.etcd_ca to trust its certificate"));
        }
        for (key, file) in [
            ("cluster.etcd_ca", &cluster.etcd_ca),
            ("cluster.etcd_cert", &cluster.etcd_cert),
            ("cluster.etcd_key", &cluster.etcd_key),
        ] {
            if https == 0 && file.is_some() {
                conflict(format!("{} is set, but {etcd} is not https", at(key)));
            }
        }
        for (one, other, set) in [
            (
                "cluster.etcd_user",
                "cluster.etcd_password",
                (cluster.etcd_user.is_some(), cluster.etcd_password.is_some()),
            ),
            (
                "cluster.etcd_cert",
                "cluster.etcd_key",
                (cluster.etcd_cert.is_some(), cluster.etcd_key.is_some()),
            ),
        ] {
            let (set, unset) = match set {
                (true, false) => (one, other),
                (false, true) => (other, one),
                _ => continue,
            };
            conflict(format!("{} is set without {unset}; give both", at(set)));
        }
        if self.node.grpc.ip().is_unspecified() && self.transfer.advertise.is_none() {
            conflict(format!(
                "{} = {} listens on every address; set transfer.advertise to the host under which \
                 routers reach this node",
                at("node.grpc"),
                self.node.grpc,
            ));
        }
    }
}

/// Returns the error for a missing required setting.
pub(crate) fn missing(key: &str) -> ConfigError {
    let setting = all_settings().into_iter().find(|setting| setting.key() == key);
    let setting = setting.expect("the key is written in this crate and its settings are tested");
    Problem::Missing { key: setting.key(), flag: setting.flag(), env: setting.env() }.into()
}

impl Model {
    /// Returns `path`, which every service requires.
    pub fn required_path(&self) -> Result<&ModelPath, ConfigError> {
        self.path.as_ref().ok_or_else(|| missing("model.path"))
    }

    /// Returns `name`, or the name that derives from `path`.
    pub fn served_name(&self) -> Result<String, ConfigError> {
        if let Some(name) = &self.name {
            return Ok(name.clone());
        }
        self.required_path()?.served_name().ok_or_else(|| missing("model.name"))
    }
}

impl Transfer {
    /// Returns the secret from its setting or file, without surrounding white space.
    pub fn required_secret(&self) -> Result<Secret, ConfigError> {
        if let Some(secret) = &self.secret {
            return Ok(secret.clone());
        }
        let Some(path) = &self.secret_file else { return Err(missing("transfer.secret_file")) };
        let text = fs::read_to_string(path)
            .map_err(|reason| Problem::FileUnreadable { path: path.clone(), reason })?;
        Secret::from_text(&text).ok_or_else(|| {
            let detail = format!(
                "transfer.secret_file = {}: expected a file with {}",
                path.display(),
                <Secret as Value>::allowed()
            );
            Problem::Conflict { detail }.into()
        })
    }

    /// Returns the host under which peers reach this node, in the form for `tcp://HOST:PORT`.
    pub fn advertised_host(&self) -> String {
        match &self.advertise {
            Some(host) => host.clone(),
            None => url_host(self.control.ip()),
        }
    }

    /// Returns the host under which routers reach a node that listens on `listens`.
    pub fn advertised_grpc_host(&self, listens: IpAddr) -> String {
        match &self.advertise {
            Some(host) if listens.is_unspecified() => host.clone(),
            _ => url_host(listens),
        }
    }
}

fn url_host(ip: IpAddr) -> String {
    match ip {
        IpAddr::V4(ip) => ip.to_string(),
        IpAddr::V6(ip) => format!("[{ip}]"),
    }
}
