#!/bin/sh
# Data and index for the recipes of the paper, into ./data, from files that you have downloaded:
#
#   prepare.sh TRAIN.parquet TEST.parquet wiki-18.jsonl.gz [ENCODER]
#
# TRAIN and TEST are those of the Hugging Face data set PeterJinGo/nq_hotpotqa_train, the corpus is that of
# PeterJinGo/wiki-18-corpus. ENCODER, such as intfloat/e5-base-v2, adds vectors, as in the paper; without it the index
# is BM25 alone. Nothing is fetched here but the encoder. May be stopped and called again.
set -eu
train=${1:?"name train.parquet; see the head of this file"}
test=${2:?"name test.parquet"}
corpus=${3:?"name the corpus"}
mkdir -p data

llds data check "$train" "$test" --train "$train" || echo "Go on only if you know why." >&2
llds data convert "$train" data/nq_hotpotqa_train.jsonl
llds data convert "$test" data/nq_hotpotqa_test.jsonl
llds index "$corpus" data/wiki-18 ${4:+--encoder "$4" --vectors ivf}
echo "Now serve the index where every machine can reach it:"
echo "  llds serve data/wiki-18 --host 0.0.0.0 --workers 4 --token-file token.txt"
