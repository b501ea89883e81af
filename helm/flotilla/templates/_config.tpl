{{/* Flotilla's configuration: the values, and what Kubernetes decides about where it listens. */}}
{{- define "flotilla.config" -}}
{{- $config := deepCopy .Values.config -}}
{{- /*
The demo's chat template shows no calls of tools, so `auto` would refuse them. Not among the values, which Helm merges: a target of
another path would keep it.
*/ -}}
{{- if and (hasPrefix "zoo:" $config.target.path) (not (hasKey $config.target "tool_parser")) -}}
{{- $_ := set $config.target "tool_parser" "hermes" -}}
{{- end -}}
{{- $http := dict "host" "0.0.0.0" "port" 8000 "direct" false -}}
{{- $_ := set $config "http" (mergeOverwrite (dict) (default (dict) $config.http) $http) -}}
{{- if dig "grpc" "enabled" false $config -}}
{{- $_ := set $config "grpc" (mergeOverwrite (dict) $config.grpc (dict "host" "0.0.0.0" "port" 9000 "direct" false)) -}}
{{- end -}}
{{- /* Of Ray's resources that groups have by `runs`, so little that it only says where: never on the head, which has none. */ -}}
{{- $scaling := default (dict) $config.scaling -}}
{{- $ofCells := dict "await_ready" true "placement" (dict "resources" (dict "flotilla-cell" 0.001)) -}}
{{- $ofFrontEnds := dict "placement" (dict "resources" (dict "flotilla-front-end" 0.001)) -}}
{{- $_ := set $config "scaling" (mergeOverwrite (dict) $scaling (dict "cells" $ofCells "front_ends" $ofFrontEnds)) -}}
{{- if .Values.apiKeys.enabled -}}
{{- $keys := dict "keys_file" (printf "/etc/flotilla/keys/%s" .Values.apiKeys.key) "require_keys" true -}}
{{- $_ := set $config "security" (mergeOverwrite (dict) (default (dict) $config.security) $keys) -}}
{{- end -}}
{{- toYaml $config -}}
{{- end }}

{{/* What the operator sends to Ray Serve. */}}
{{- define "flotilla.serveConfig" -}}
proxy_location: EveryNode
http_options:
  host: 0.0.0.0
  port: 8000
{{- if dig "grpc" "enabled" false .Values.config }}
grpc_options:
  port: 9000
  grpc_servicer_functions:
    - deployments.grpc_proxy.add_generation_to_proxy
    - grpc_health.v1.health_pb2_grpc.add_HealthServicer_to_server
  enable_reflection: true
{{- with dig "grpc" "default_deadline_s" 600 .Values.config }}
  request_timeout_s: {{ . }}
{{- end }}
{{- end }}
applications:
  - name: flotilla
    route_prefix: /
    import_path: deployments.serving:build_app
    args:
      {{- include "flotilla.config" . | nindent 6 }}
{{- end }}
