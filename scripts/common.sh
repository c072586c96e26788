# shellcheck shell=sh
# Read by the launchers. apt_install: packages that are missing, as root on Debian. find_python: sets $python.

apt_install() {
    if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
        echo "$(basename "$0"): error: needs the Debian packages: $*" >&2
        exit 11
    fi
    # Messages go to stderr: stdout is the command's own.
    { DEBIAN_FRONTEND=noninteractive apt-get -q update || true
      DEBIAN_FRONTEND=noninteractive apt-get -q -y --no-install-recommends install "$@"; } </dev/null >&2
}

python_of() {
    for python in "${PYTHON:-}" python3 python3.13 python3.12 python3.11 /usr/bin/python3; do
        [ -n "$python" ] && "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && return 0
    done
    return 1
}

find_python() {
    python_of && return 0
    apt_install python3
    python_of && return 0
    echo "$(basename "$0"): error: needs python3 >= 3.11" >&2
    exit 11
}
