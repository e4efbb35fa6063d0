"""The environment `tools`: a calculator, Python in a sandbox and other functions, with a reward for the final answer."""
