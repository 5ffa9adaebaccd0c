#!/usr/bin/env bash
# Makes CACHE/llama-cpp, the environment of the llama.cpp peer, from the source that llama-cpp-python carries; about
# fifteen minutes of one core. Usage: make_llama_cpp.sh CACHE
set -euo pipefail
home="${1:?Give the cache folder.}/llama-cpp"
version=0.3.36
mkdir -p "$home"
[ -x "$home/bin/python" ] || "${PYTHON:-python3}" -m venv "$home"
"$home/bin/pip" install scikit-build-core cmake ninja flit-core
if [ ! -d "$home/source" ]; then
  "$home/bin/pip" download --no-deps --no-build-isolation --no-binary :all: --dest "$home/sdist" "llama-cpp-python==$version"
  mkdir -p "$home/unpacked"
  tar -xzf "$home"/sdist/llama_cpp_python-"$version".tar.gz -C "$home/unpacked" --strip-components 1
  mv "$home/unpacked" "$home/source"
fi
# The library alone, for this machine's instructions; no OpenMP, since one thread is measured.
export CMAKE_ARGS="-DGGML_NATIVE=ON -DGGML_OPENMP=OFF -DLLAVA_BUILD=OFF -DLLAMA_BUILD_TOOLS=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_SERVER=OFF -DLLAMA_CURL=OFF"
export CMAKE_BUILD_PARALLEL_LEVEL="${CMAKE_BUILD_PARALLEL_LEVEL:-1}"
"$home/bin/pip" install --no-build-isolation "$home/source"
"$home/bin/python" -c 'import llama_cpp; print("llama-cpp-python", llama_cpp.__version__)'
