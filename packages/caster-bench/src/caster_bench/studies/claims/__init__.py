"""The paper's claims beside what verified records say of them, judged by rules set beforehand."""
