#!/usr/bin/env bash
# Checks pools with a base on one GPU (docs/fixed-addresses.md). Each line of a result starts with PASS, FAIL or NOTE. The last line has the
# number of failures, which is also the exit code.
#
#   cargo build --release -p symmalloc-nccl --example fixed_addresses
#   cargo build --release -p symmalloc-torch --lib
#   benches/jobs/fixed_addresses.sh target/release/examples/fixed_addresses target/release/libsymmalloc_torch.so
#
# Without the second argument, the parts with PyTorch are skipped. RUNS is the number of processes whose addresses are compared, by default
# 100. NCCL is found as by every program: LD_LIBRARY_PATH, or the one in PyTorch's wheel.
set -u
example=${1:?the example fixed_addresses}
library=${2:-}
runs=${RUNS:-100}
folder=$(mktemp -d)
here=$(cd "$(dirname "$0")" && pwd)
failed=0
trap 'rm -rf "$folder"' EXIT

note() { echo "NOTE $*"; }
result() { # result STATUS TEXT
  if [ "$1" -eq 0 ]; then echo "PASS $2"; else echo "FAIL $2"; failed=$((failed + 1)); fi
}

# NCCL of PyTorch's wheel, if no other is on the path.
if ! ldconfig -p 2>/dev/null | grep -q libnccl.so.2; then
  wheel=$(python3 -c 'import nvidia.nccl, os; print(os.path.join(list(nvidia.nccl.__path__)[0], "lib"))' 2>/dev/null)
  if [ -n "$wheel" ]; then export LD_LIBRARY_PATH="$wheel${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"; fi
fi

part() { # part NAME SECONDS ARGUMENTS
  local name=$1 seconds=$2
  shift 2
  echo "== $name"
  timeout "$seconds" "$example" "$@" 2>&1 | tee "$folder/$name"
  local status=${PIPESTATUS[0]}
  failed=$((failed + $(grep -c '^FAIL' "$folder/$name")))
  if [ "$status" -ne 0 ] && ! grep -q '^FAIL' "$folder/$name"; then result 1 "$name ended with $status"; fi
}

digests() { # digests FILE: the digests in a file, without duplicates
  grep -o '^DIGEST [0-9a-f]*' "$1" | sort -u
}

echo "== addresses, $(cat /proc/sys/kernel/randomize_va_space) in randomize_va_space"
: > "$folder/alone"
for ((run = 0; run < runs; run++)); do timeout 60 "$example" addresses >> "$folder/alone" 2>&1 || echo "ended with $?" >> "$folder/alone"; done
[ "$(grep -c '^DIGEST' "$folder/alone")" -eq "$runs" ] && [ "$(digests "$folder/alone" | wc -l)" -eq 1 ]
result $? "$runs processes, one after the other: $(digests "$folder/alone" | tr '\n' ' ')"
grep -v '^DIGEST' "$folder/alone" | head -5

timeout 60 "$example" addresses > "$folder/first" 2>&1 &
timeout 60 "$example" addresses > "$folder/second" 2>&1
wait $!
cat "$folder/alone" "$folder/first" "$folder/second" > "$folder/both"
[ "$(grep -c '^DIGEST' "$folder/both")" -eq $((runs + 2)) ] && [ "$(digests "$folder/both" | wc -l)" -eq 1 ]
result $? "two processes at the same time on one device"

part sizes 60 sizes
part segments 120 segments
part graph 120 graph
part errors 60 errors

if [ -n "$library" ]; then
  export SYMMALLOC_LIBRARY=$library PYTHONPATH="$here/../../crates/symmalloc-torch/python${PYTHONPATH:+:$PYTHONPATH}"
  echo "== next to PyTorch and NCCL"
  timeout 240 python3 "$here/fixed_addresses.py" --busy 200 > "$folder/busy" 2>&1 &
  busy=$!
  for ((second = 0; second < 60; second++)); do grep -q '^READY' "$folder/busy" && break; sleep 1; done
  : > "$folder/next"
  count=0
  for ((run = 0; run < runs / 4; run++)); do
    kill -0 $busy 2>/dev/null || break
    timeout 60 "$example" addresses >> "$folder/next" 2>&1
    count=$((count + 1))
  done
  kill $busy 2>/dev/null
  wait $busy 2>/dev/null
  cat "$folder/alone" "$folder/next" > "$folder/all"
  [ "$count" -gt 0 ] && [ "$(grep -c '^DIGEST' "$folder/next")" -eq "$count" ] && [ "$(digests "$folder/all" | wc -l)" -eq 1 ]
  result $? "$count processes while a PyTorch process with NCCL uses the device"
  grep -q '^READY' "$folder/busy" || { result 1 "the PyTorch process did not start"; tail -5 "$folder/busy"; }

  echo "== PyTorch"
  timeout 600 python3 "$here/fixed_addresses.py" --processes 20 2>&1 | tee "$folder/torch"
  status=${PIPESTATUS[0]}
  failed=$((failed + $(grep -c '^FAIL' "$folder/torch")))
  if [ "$status" -ne 0 ] && ! grep -q '^FAIL' "$folder/torch"; then result 1 "fixed_addresses.py ended with $status"; fi
else
  note "no library: the parts with PyTorch are skipped"
fi

echo "== cuda-checkpoint"
if command -v cuda-checkpoint > /dev/null; then
  timeout 60 "$example" checkpoint 20 > "$folder/checkpoint" 2>&1 &
  process=$!
  for ((second = 0; second < 20; second++)); do grep -q '^READY' "$folder/checkpoint" && break; sleep 1; done
  child=$(grep -o '^READY [0-9]*' "$folder/checkpoint" | cut -d' ' -f2)
  for action in suspend resume suspend resume; do
    timeout 30 cuda-checkpoint --toggle --pid "$child" > "$folder/toggle" 2>&1
    result $? "cuda-checkpoint, $action: $(tr '\n' ' ' < "$folder/toggle")"
    sleep 1
  done
  wait $process
  result $? "a process with a base after cuda-checkpoint: $(tail -1 "$folder/checkpoint")"
else
  note "this machine has no cuda-checkpoint"
fi

echo "$failed failures"
exit "$failed"
