# shellcheck shell=bash disable=SC2034,SC2153,SC2154 # the parts share their variables
# --uninstall: removes what this script made in this checkout, which .flexops/made lists, and only that.

uninstall() {
  local path paths=()
  STEP='uninstall' MEND='make the paths above writable, then run the same command again'
  if [[ ! -e $STATE/made ]]; then
    say 'nothing to remove: this script made nothing in this checkout'
    return
  fi
  while read -r path; do
    is_ours "$path" && paths+=("$path")
  done <"$STATE/made"
  for path in env.sh env.posix.sh requirements.lock bin cuda cache lock packages checked checked.date made; do # `made` last: an interrupted removal can go on
    [[ ! -e $STATE/$path ]] || paths+=("$STATE/$path")
  done
  say "${BOLD}Will be removed$PLAIN"
  printf '  %s\n' "${paths[@]}"
  [[ ! -e $STATE/packages ]] || say "  (ccache was installed with the system's package manager and stays; remove it there if nothing else uses it)"
  if [[ -n $DRY_RUN ]]; then
    say '--dry-run: nothing was done'
  elif [[ -n $YES ]] || ! on_terminal || ask 'Go ahead?' n; then
    for path in "${paths[@]}"; do
      [[ ! -e $path/$MARKER ]] || printf '%s\n' "$path" >>"$STATE/unfinished"
    done
    rm -rf -- "${paths[@]}"
    rm -f -- "$STATE/unfinished"
    rmdir -- "$STATE" 2>/dev/null || note "$STATE holds more, which this script did not make; it stays"
    say 'removed; in a shell that has sourced env.sh, flexops_env_undo takes its settings back'
  else
    say 'nothing was done'
  fi
}

# is_ours PATH: it is there, and still is what this script made: something in this checkout, or an environment with our marker.
is_ours() {
  [[ -e $1 ]] || return 1
  case $1 in
    "$ROOT"/flexops/_aot | "$ROOT"/flexops.egg-info | "$ROOT"/flexops_torch.egg-info | "$ROOT"/tools/flexops_tools.egg-info) return 0 ;;
    *) [[ -e $1/$MARKER || (-d $1 && -z $(ls -A "$1")) ]] || grep -qxF -- "$1" "$STATE/unfinished" 2>/dev/null ;;
  esac
}
