#!/bin/sh
# Installs what the native core is compiled with.
set -eu
command -v g++ >/dev/null || {
  apt-get update
  apt-get install --yes --no-install-recommends g++
}
python3 -m venv /opt/tools
/opt/tools/bin/pip install nanobind cmake ninja
