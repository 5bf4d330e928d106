"""Matrix-vector products of a decode step, with their fused prologues and epilogues."""
