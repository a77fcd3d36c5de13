# shellcheck shell=bash disable=SC2034,SC2153,SC2154 # the parts share their variables
# Talking to the person at the terminal: steps that name themselves when they fail, questions, quoting.

if [[ -t 1 && -z ${NO_COLOR:-} ]]; then
  BOLD=$'\e[1m' DIM=$'\e[2m' RED=$'\e[31m' PLAIN=$'\e[0m'
else
  BOLD='' DIM='' RED='' PLAIN=''
fi

STEP='' # the step that is running, and what to do when it fails
MEND=''
STEP_NUMBER=0
FAILED_AT=''
FAILURE_TOLD=''

say() { printf '%s\n' "$*"; }

note() { printf '  %s%s%s\n' "$DIM" "$*" "$PLAIN"; }

warn() { printf '%swarning:%s %s\n' "$RED" "$PLAIN" "$*" >&2; }

# die WHAT MEND: end with an error that says what to do about it.
die() {
  FAILURE_TOLD=yes
  {
    printf '%sFAILED:%s %s%s\n' "$RED" "$PLAIN" "${STEP:+step \"$STEP\": }" "$1"
    printf '  mend: %s\n' "$2"
  } >&2
  exit 1
}

# step NAME MEND COMMAND [ARGUMENT...]: run a part of the work; if it fails, the name and the mend are printed.
step() {
  STEP=$1 MEND=$2
  shift 2
  STEP_NUMBER=$((STEP_NUMBER + 1))
  printf '\n%s%d. %s%s\n' "$BOLD" "$STEP_NUMBER" "$STEP" "$PLAIN"
  "$@"
  STEP='' MEND=''
}

# From here on no failure goes without the name of its step. Commands in $(...) are covered by the command that holds them.
watch_failures() {
  set -E
  trap '[[ $BASH_SUBSHELL -gt 0 ]] || FAILED_AT="$BASH_COMMAND (${BASH_SOURCE[0]##*/}:$LINENO)"' ERR
  trap 'tell_failure $?' EXIT
  trap 'exit 130' INT
  trap 'exit 143' TERM
}

tell_failure() {
  local status=$1
  [[ $status -ne 0 && -z $FAILURE_TOLD ]] || return 0
  {
    if [[ $status -eq 130 || $status -eq 143 ]]; then
      printf '\ninterrupted%s; nothing is lost: run the same command again\n' "${STEP:+ in step \"$STEP\"}"
    elif [[ -n $STEP ]]; then
      printf '\n%sFAILED:%s step "%s" (exit status %d)\n' "$RED" "$PLAIN" "$STEP" "$status"
      [[ -z $FAILED_AT ]] || printf '  command: %s\n' "$FAILED_AT"
      printf '  mend: %s\n' "$MEND"
    elif [[ -n $FAILED_AT ]]; then
      printf '\n%sFAILED:%s %s (exit status %d)\n' "$RED" "$PLAIN" "$FAILED_AT" "$status"
      printf '  mend: run again with bash -x in front to see what led there\n'
    fi
  } >&2
}

# ask QUESTION DEFAULT(y|n): true for yes. Only for terminals: callers decide first what silence means.
ask() {
  local answer hint='[y/N]'
  [[ $2 != y ]] || hint='[Y/n]'
  read -r -p "$1 $hint " answer || answer=''
  [[ ${answer:-$2} == [yY]* ]]
}

on_terminal() { [[ -t 0 && -t 1 ]]; }

# quoted TEXT: as one word for any POSIX shell.
quoted() {
  if [[ $1 =~ ^[A-Za-z0-9_./:=,@%+-]+$ ]]; then
    printf '%s' "$1"
  else
    printf "'%s'" "${1//\'/\'\\\'\'}"
  fi
}
