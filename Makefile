# make demo        train a small GPT on this machine's Python standard library, in minutes
# make rehearse    the TPU path of a small GPT on eight virtual devices, with a resume, in minutes
# make preflight   GPT-2 124M compiled by the real TPU compiler, without a TPU: does it fit, how fast, what costs most
# make soak        a hundred kills, each followed by a resume: is the end that of an unbroken run?
# make bench       host time, tokens/s on a CPU, loading, saving, and the compiler's estimates; half an hour, see bench/RESULTS.md
# make test        everything that is checked
# make test-2.8    the TPU's tests on torch_xla 2.8.0, the version of Kaggle's image
# make notebooks   build the notebooks from their .py twins and py/; fails when a committed one differs
# make owner OWNER=name/repository   point the badges at your fork
# make kaggle KAGGLE_USER=name       what `kaggle kernels push` needs, the TPU chosen, below build/kaggle

PYTHON ?= python3
VENV ?= .venv
RUN = $(VENV)/bin/python
DEMO ?= runs/demo

PRESET ?= gpt2-124m
ATTACH ?=

.PHONY: demo rehearse preflight soak bench test test-2.8 notebooks owner kaggle clean
.DELETE_ON_ERROR:

demo: $(VENV)/.ready
	$(RUN) data_prep/prepare.py stdlib --out data/stdlib --encoding bytes --max-bytes 12000000
	$(RUN) py/train_gpt.py --preset demo --platform cpu --data_folder data/stdlib --run_folder $(DEMO)

rehearse: $(VENV)/.ready
	$(RUN) data_prep/prepare.py stdlib --out data/stdlib --encoding bytes --max-bytes 12000000
	rm -rf runs/rehearsal
	$(RUN) py/train_gpt.py --preset tiny --platform virtual-tpu --data_folder data/stdlib --run_folder runs/rehearsal \
		--tokens_per_step 2048 --max_steps 40 --stop_at 20 --save_every 20 --eval_every 20 --log_every 5
	$(RUN) py/resume_gpt.py --source runs/rehearsal --platform virtual-tpu

preflight: $(VENV)/.preflight-ready
	$(RUN) py/preflight.py --preset $(PRESET) --chip v5e-8

soak: $(VENV)/.test-ready
	$(RUN) tests/soak.py --kills 100

bench: $(VENV)/.preflight-ready
	$(RUN) bench/host_time.py
	$(RUN) bench/cpu_speed.py
	$(RUN) bench/data_speed.py
	$(RUN) bench/checkpoint_speed.py
	$(RUN) bench/compile_estimates.py

test: $(VENV)/.test-ready
	$(RUN) notebooks/build.py --check
	$(RUN) -m pytest tests -q

test-2.8: $(VENV)-2.8/.ready
	$(VENV)-2.8/bin/python -m pytest tests/test_virtual_tpu.py tests/test_traps.py tests/test_compile_guard.py \
		tests/test_micro_steps.py tests/test_tpu_attention.py tests/test_optimizer.py -q

notebooks: $(VENV)/.ready
	$(RUN) notebooks/build.py

owner: $(VENV)/.ready
	$(RUN) notebooks/build.py --owner $(OWNER)

kaggle: $(VENV)/.ready
	@$(RUN) notebooks/kaggle_files.py --user '$(KAGGLE_USER)' --attach $(ATTACH)

$(VENV)/.ready: requirements.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed: make PYTHON=python3.12 demo")'
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	@echo "installing torch and its friends into $(VENV), several GB, 2-5 minutes, once"
	$(RUN) -m pip install --quiet --progress-bar on -r requirements.txt
	touch $@

# The TPU compiler, and the JAX that torch_xla 2.9.0 names for its kernels. Nothing of it is used without a TPU otherwise.
$(VENV)/.preflight-ready: $(VENV)/.ready
	$(RUN) -m pip install --quiet jax==0.7.1 jaxlib==0.7.1 libtpu==0.0.21
	touch $@

$(VENV)/.test-ready: $(VENV)/.preflight-ready tests/requirements.txt
	$(RUN) -m pip install --quiet -r tests/requirements.txt
	$(RUN) -m pip install --quiet --no-deps openai-whisper==20250625   # for its copy of GPT-2's vocabulary file alone
	touch $@

# The pair on Kaggle's image, in an environment of its own, with the libtpu there and the JAX that torch_xla 2.8.0 names.
$(VENV)-2.8/.ready: requirements.txt tests/requirements.txt
	test -x $(VENV)-2.8/bin/python || $(PYTHON) -m venv $(VENV)-2.8
	sed 's/==2.9.0/==2.8.0/' requirements.txt | $(VENV)-2.8/bin/python -m pip install --quiet -r /dev/stdin
	$(VENV)-2.8/bin/python -m pip install --quiet -r tests/requirements.txt
	$(VENV)-2.8/bin/python -m pip install --quiet jax==0.6.2 jaxlib==0.6.2 libtpu==0.0.17
	touch $@

clean:
	rm -rf $(VENV) $(VENV)-2.8 runs data
