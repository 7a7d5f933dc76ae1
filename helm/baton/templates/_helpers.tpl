{{- /*
Name of an object: (list $ "suffix"). A Pod's name is at most 17 characters longer, a label has at most 63. The id of a node in
a group, at most 64, is the Pod's name and up to 11 characters.
*/ -}}
{{- define "baton.name" -}}
{{- $ := index . 0 -}}
{{- $release := $.Values.fullnameOverride | default (contains "baton" $.Release.Name | ternary $.Release.Name (printf "%s-baton" $.Release.Name)) -}}
{{- $name := join "-" (prepend (rest .) $release) -}}
{{- $longest := eq (last .) "group" | ternary 36 46 -}}
{{- if gt (len $name) $longest -}}
{{- $name = printf "%s-%s" (trunc (sub $longest 9 | int) $name | trimSuffix "-") (sha256sum $name | trunc 8) -}}
{{- end -}}
{{- $name -}}
{{- end -}}

{{- /* The models by key, with the defaults, and each with its key and its name. */ -}}
{{- define "baton.models" -}}
{{- if not .Values.models }}{{ fail "models is empty; expected at least one model, such as --set models.smollm2-135m.source=hf:HuggingFaceTB/SmolLM2-135M-Instruct" }}{{ end -}}
{{- $models := dict -}}
{{- $names := dict -}}
{{- range $key, $own := .Values.models -}}
{{- $model := include "baton.over" (list $.Values.modelDefaults $own) | fromJson -}}
{{- $name := $model.name | default $key -}}
{{- with get $names $name }}{{ fail (printf "models.%s and models.%s have the same name, %q; expected another name" . $key $name) }}{{ end -}}
{{- $_ := set $names $name $key -}}
{{- $_ := set $models $key (merge (dict "key" $key "name" $name) $model) -}}
{{- end -}}
{{- toJson $models -}}
{{- end -}}

{{- /* Labels that select a component's pods: (list $ "decode" "key"). The key of the model is optional. */ -}}
{{- define "baton.selector" -}}
app.kubernetes.io/name: baton
app.kubernetes.io/instance: {{ (index . 0).Release.Name | quote }}
app.kubernetes.io/component: {{ index . 1 }}
{{- if gt (len .) 2 }}
baton/model: {{ index . 2 | quote }}
{{- end }}
{{- end -}}

{{- define "baton.labels" -}}
{{ include "baton.selector" . }}
app.kubernetes.io/version: {{ (index . 0).Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ (index . 0).Release.Service }}
helm.sh/chart: {{ (index . 0).Chart.Name }}-{{ (index . 0).Chart.Version }}
{{- end -}}

{{- /* Image reference: (list $ image-values). */ -}}
{{- define "baton.image" -}}
{{- $ := index . 0 -}}{{- $image := index . 1 -}}
{{- if $image.digest -}}
{{ $image.repository }}@{{ $image.digest }}
{{- else -}}
{{ $image.repository }}:{{ $image.tag | default $.Chart.AppVersion }}{{ with $image.variant }}-{{ . }}{{ end }}
{{- end -}}
{{- end -}}

{{- /*
Values over their defaults, one level deep: (list defaults values). Sprig's merge would ignore false and 0. Two kinds of volume or affinity
do not mix.
*/ -}}
{{- define "baton.over" -}}
{{- $over := deepCopy (index . 0) -}}
{{- range $key, $value := index . 1 -}}
{{- if and (kindIs "map" $value) (kindIs "map" (get $over $key)) (not (has $key (list "affinity" "volume"))) -}}
{{- range $inner, $it := $value -}}{{- $_ := set (index $over $key) $inner $it -}}{{- end -}}
{{- else -}}
{{- $_ := set $over $key $value -}}
{{- end -}}
{{- end -}}
{{- toJson $over -}}
{{- end -}}

{{- /*
A list of the chart, in which entries of the user replace entries with the same key: (list chart-entries entries "path" "key"). Kubernetes
refuses two entries with one key.
*/ -}}
{{- define "baton.entries" -}}
{{- $path := index . 2 -}}{{- $key := index . 3 -}}
{{- $own := dict -}}
{{- range $entry := index . 1 -}}
{{- $value := get $entry $key -}}
{{- if not $value }}{{ fail (printf "%s has an entry without %s; expected every entry to have one" $path $key) }}{{ end -}}
{{- if hasKey $own $value }}{{ fail (printf "%s has two entries with %s %q; expected one" $path $key $value) }}{{ end -}}
{{- $_ := set $own $value $entry -}}
{{- end -}}
{{- $entries := list -}}
{{- $replaced := dict -}}
{{- range index . 0 -}}
{{- $entries = append $entries (get $own (get . $key) | default .) -}}
{{- $_ := set $replaced (get . $key) true -}}
{{- end -}}
{{- range index . 1 -}}
{{- if not (hasKey $replaced (get . $key)) }}{{- $entries = append $entries . -}}{{ end -}}
{{- end -}}
{{- toYaml $entries -}}
{{- end -}}

{{- /* Labels or annotations of the chart and those of the user, which may not repeat them: (list chart-values values "path"). */ -}}
{{- define "baton.extend" -}}
{{- $all := deepCopy (index . 0) -}}
{{- $path := index . 2 -}}
{{- range $key, $value := index . 1 -}}
{{- if hasKey $all $key }}{{ fail (printf "%s has %q, which the chart sets; expected another key" $path $key) }}{{ end -}}
{{- $_ := set $all $key $value -}}
{{- end -}}
{{- toYaml $all -}}
{{- end -}}

{{- /* Fails if the namespace refuses pods above the Pod Security level restricted: (list $ "what is set"). */ -}}
{{- define "baton.privileged" -}}
{{- $ := index . 0 -}}
{{- $level := lookup "v1" "Namespace" "" $.Release.Namespace | dig "metadata" "labels" "pod-security.kubernetes.io/enforce" "" -}}
{{- if has $level (list "baseline" "restricted") -}}
{{- fail (printf "%s, which namespace %s refuses; expected its label pod-security.kubernetes.io/enforce to be privileged, not %s" (index . 1) $.Release.Namespace $level) -}}
{{- end -}}
{{- end -}}

{{- /*
Names of the nodes in each pod of a grouped model, in the order of their ports. gRPC starts at port 50100, control messages at
50200, KV at 50300, metrics at 50400.
*/ -}}
{{- define "baton.group" -}}
{{- $names := list -}}
{{- range $role := list "prefill" "decode" -}}
{{- range $index := until (index $ $role | default dict | dig "replicas" 1 | int) -}}
{{- $names = append $names (printf "%s-%d" $role $index) -}}
{{- end -}}
{{- end -}}
{{- toJson $names -}}
{{- end -}}

{{- /* Nodes that a pool has at least: (list $ model "decode"). */ -}}
{{- define "baton.expected" -}}
{{- $ := index . 0 -}}{{- $model := index . 1 -}}{{- $role := index . 2 -}}
{{- $grouped := eq $.Values.layout "grouped" -}}
{{- $pool := include "baton.over" (list $.Values.nodes (index $model ($grouped | ternary "group" $role) | default dict)) | fromJson -}}
{{- $pods := int64 ($pool.autoscaling.enabled | ternary $pool.autoscaling.min $pool.replicas) -}}
{{- if not $grouped -}}
{{- $pods -}}
{{- else -}}
{{- mul $pods (index $model $role | default dict | dig "replicas" 1 | int64) -}}
{{- end -}}
{{- end -}}

{{- /* Settings as TOML. Helm reads numbers as floats (64.0, 1.6777216e+07); all numbers of the programs are integers. */ -}}
{{- define "baton.toml" -}}
{{- range $section, $settings := . }}
[{{ $section }}]
{{- range $key, $value := $settings }}
{{- if kindIs "float64" $value }}
{{ $key }} = {{ int64 $value }}
{{- else if not (kindIs "invalid" $value) }}
{{ $key }} = {{ toJson $value }}
{{- end }}
{{- end }}
{{ end }}
{{- end -}}

{{- /* Whole seconds of a duration such as 500ms, 25s or 10m, rounded up. */ -}}
{{- define "baton.seconds" -}}
{{- $number := regexFind "^[0-9]+" . | int64 -}}
{{- $unit := regexFind "[a-z]+$" . -}}
{{- if eq $unit "h" }}{{ mul $number 3600 }}
{{- else if eq $unit "m" }}{{ mul $number 60 }}
{{- else if eq $unit "s" }}{{ $number }}
{{- else }}{{ div (add $number 999) 1000 }}
{{- end -}}
{{- end -}}

{{- /* Grace period: (list "models.0.decode" values "drain_timeout"). The sum of these settings, and 10 s to stop. */ -}}
{{- define "baton.grace" -}}
{{- $path := index . 0 -}}{{- $values := index . 1 -}}
{{- $least := 10 -}}
{{- range slice . 2 -}}
{{- $time := index $values.config . -}}
{{- if not $time }}{{ fail (printf "%s.config.%s is null; expected a duration such as 20s, which the grace period covers" $path .) }}{{ end -}}
{{- $least = add $least (include "baton.seconds" $time) -}}
{{- end -}}
{{- $set := $values.terminationGracePeriodSeconds -}}
{{- if kindIs "invalid" $set -}}
{{- $least -}}
{{- else if lt (int64 $set) (int64 $least) -}}
{{- fail (printf "%s.terminationGracePeriodSeconds is %d; expected at least %d: the drain settings of %s.config and 10 s" $path (int64 $set) (int64 $least) $path) -}}
{{- else -}}
{{- int64 $set -}}
{{- end -}}
{{- end -}}

{{- /* Section [cluster]. Routers without etcd also get the nodes' DNS names. */ -}}
{{- define "baton.cluster" -}}
{{- $etcd := .Values.etcd -}}
{{- $cluster := deepCopy $etcd.config -}}
{{- if $etcd.endpoints -}}
{{- $_ := set $cluster "etcd" $etcd.endpoints -}}
{{- $_ := set $cluster "etcd_prefix" ($cluster.etcd_prefix | default (printf "/baton/%s/%s" .Release.Namespace .Release.Name)) -}}
{{- else if $etcd.bundled -}}
{{- $_ := set $cluster "etcd" (list (printf "http://%s:2379" (include "baton.name" (list . "etcd")))) -}}
{{- end -}}
{{- if $etcd.tlsSecret -}}
{{- $_ := set $cluster "etcd_ca" "/etc/baton/etcd/ca.crt" -}}
{{- if $etcd.clientCertificate -}}
{{- $_ := set $cluster "etcd_cert" "/etc/baton/etcd/tls.crt" -}}
{{- $_ := set $cluster "etcd_key" "/etc/baton/etcd/tls.key" -}}
{{- end -}}
{{- end -}}
{{- if .Values.clusterTls.secret -}}
{{- range $key, $file := dict "cert" "tls.crt" "key" "tls.key" "ca" "ca.crt" -}}
{{- $_ := set $cluster (printf "tls_%s" $key) (printf "/etc/baton/cluster/%s" $file) -}}
{{- end -}}
{{- $_ := set $cluster "tls_name" .Values.clusterTls.name -}}
{{- end -}}
{{- toJson $cluster -}}
{{- end -}}

{{- /* Path of a model inside the containers. */ -}}
{{- define "baton.path" -}}
{{- if not .source -}}
{{- fail (printf "models.%s.source is empty; expected hf:ORG/NAME, or a path within `volume`" .key) -}}
{{- else if hasPrefix "hf:" .source -}}
{{- .source -}}
{{- else if not .volume -}}
{{- fail (printf "models.%s.source is %q; expected hf:ORG/NAME, or a path within `volume`, which is empty" .key .source) -}}
{{- else -}}
/models/{{ .key }}/{{ trimPrefix "/" .source }}
{{- end -}}
{{- end -}}

{{- define "baton.secret" -}}
{{ .Values.existingSecret | default (include "baton.name" (list . "cluster")) }}
{{- end -}}

{{- /* Fails where the cluster lacks a kind: (list $ "value" "group/version" "Kind"). */ -}}
{{- define "baton.crd" -}}
{{- if not ((index . 0).Capabilities.APIVersions.Has (printf "%s/%s" (index . 2) (index . 3))) -}}
{{- fail (printf "%s needs the kind %s of %s, which this cluster lacks; install its CRD, or set %s to false" (index . 1) (index . 3) (index . 2) (index . 1)) -}}
{{- end -}}
{{- end -}}

{{- /* Fails if a pool cannot scale between its numbers: (list "router" autoscaling-values). */ -}}
{{- define "baton.between" -}}
{{- $path := index . 0 -}}{{- $scaling := index . 1 -}}
{{- if gt (int64 $scaling.min) (int64 $scaling.max) -}}
{{- fail (printf "%s.autoscaling.min is %d; expected at most max, which is %d" $path (int64 $scaling.min) (int64 $scaling.max)) -}}
{{- end -}}
{{- end -}}

{{- /*
Transport between pods with GPUs. A container cannot map the memory of another container's GPU. Without RDMA, tcp is faster than nccl.
*/ -}}
{{- define "baton.transport" -}}
{{- .Values.transfer.config.transport | default (empty .Values.gpu.rdma.resource | ternary "tcp" "nccl") -}}
{{- end -}}

{{- /* KEDA trigger: (list $ "query" threshold), or with a metric type other than AverageValue: (list $ "query" threshold "Value"). */ -}}
{{- define "baton.trigger" -}}
type: prometheus
{{- if gt (len .) 3 }}
metricType: {{ index . 3 }}
{{- end }}
metadata:
  serverAddress: {{ (index . 0).Values.monitoring.prometheus | quote }}
  query: {{ index . 1 | quote }}
  threshold: {{ index . 2 | quote }}
  # Without data the trigger fails, and the pool keeps its replicas.
  ignoreNullValues: "false"
{{- end -}}
