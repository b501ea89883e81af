{{/* Environment of every container with Flotilla's code. The root file system is read-only: caches go to /tmp. */}}
{{- define "flotilla.env" -}}
- {name: HOME, value: /tmp}
- {name: XDG_CACHE_HOME, value: /tmp/cache}
- {name: HF_HOME, value: /tmp/huggingface}
- {name: RAY_USAGE_STATS_ENABLED, value: "0"}
{{- if eq .Values.rayAuthentication "disabled" }}
- {name: RAY_AUTH_MODE, value: disabled}
{{- end }}
{{- end }}

{{/*
Beside it, of Ray's containers: cluster/process_environment.py. Ray's processes have it from here, and the arenas of glibc's
allocator, which it reads when a process starts, from nowhere else.
*/}}
{{- define "flotilla.processEnv" -}}
- {name: MALLOC_ARENA_MAX, value: "2"}
- {name: OMP_NUM_THREADS, value: "1"}
- {name: MKL_NUM_THREADS, value: "1"}
- {name: OMP_WAIT_POLICY, value: PASSIVE}
- {name: TOKENIZERS_PARALLELISM, value: "false"}
- {name: HF_HUB_OFFLINE, value: "1"}
{{- end }}

{{/*
Of variables in the order given, the last one of each name: the API server refuses a name that comes twice. It stays where it is,
behind variables that its value may refer to.
*/}}
{{- define "flotilla.lastOfEachName" -}}
{{- $last := dict -}}{{- $kept := list -}}
{{- range $index, $variable := . -}}{{- $_ := set $last $variable.name $index -}}{{- end -}}
{{- range $index, $variable := . -}}
{{- if eq $index (get $last $variable.name) -}}{{- $kept = append $kept $variable -}}{{- end -}}
{{- end -}}
{{- toYaml $kept -}}
{{- end }}
