"""axolotl-ringmaster: ranks that share a sequence, each computing a part of it, with all of it in attention."""

from hf_longmoe.integrations.ringmaster.versions import check_ringmaster

__all__ = ["check_ringmaster"]
